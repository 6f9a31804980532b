"""Run files whose models are configs alone."""

import pytest

from planish.runfile import load


@pytest.fixture
def run_of(tmp_path, tiny_model):
    """Return (family, *settings, **config) -> a run file for a tiny model of that family, its config alone on disk."""

    def make(family, *settings, **config):
        folder = tmp_path / family
        tiny_model(family, **config).config.save_pretrained(folder)
        base = [("model.config", str(folder / "config.json")), ("data.train", "none"), ("data.eval", "none")]
        return load(None, [*base, ("data.context", 64), *settings])

    return make
