"""The house rules that no linter knows: sizes of files, depth of folders, what the command line imports."""

import subprocess
import sys
from pathlib import Path

import planish

ROOT = Path(planish.__file__).parent
MAX_LINES = 400
MAX_DEPTH = 3
# Longer files, each with the reason; the list may only shrink.
EXEMPT: dict[str, str] = {}


def test_files_can_be_read_in_one_sitting():
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in ROOT.rglob("*.py")}
    assert {name: size for name, size in sizes.items() if size > MAX_LINES and name not in EXEMPT} == {}
    assert [name for name in EXEMPT if sizes.get(name, 0) <= MAX_LINES] == []


def test_folders_are_shallow_and_every_room_says_what_it_is():
    for path in ROOT.rglob("*.py"):
        assert len(path.relative_to(ROOT).parts) <= MAX_DEPTH, path
        assert path.read_text().lstrip().startswith('"""'), f"{path} does not begin with its sentence"


def test_import_planish_imports_neither_torch_nor_transformers():
    code = "import sys, planish; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
