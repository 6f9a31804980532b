# Every target sets up its own virtual environment first; nothing needs to be installed by hand.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
INSTALL := $(RUN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
SOURCES := pyproject.toml constraints.txt $(wildcard src/planish/kernels/*.cpp src/planish/kernels/*.h)

.PHONY: demo test check nightly clean

demo: $(VENV)/.planish
	$(RUN)/planish demo

test: check
	$(RUN)/python -m pytest

check: $(VENV)/.test
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/lint-imports

# The slow sweeps, and everything else.
nightly: check
	$(RUN)/python -m pytest -m "slow or not slow" --timeout 3600

$(VENV)/.test: $(VENV)/.planish
	$(INSTALL) '.[test]'
	touch $@

$(VENV)/.planish: $(SOURCES)
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "planish needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) .
	touch $@

clean:
	rm -rf $(VENV)
