"""A small parent and a library of its blocks."""

import pytest
import torch

from planish.compress.calibrate import Calibration, calibrate
from planish.compress.library import Library
from planish.compress.parent import WholeParent
from planish.compress.space import Menu

MENU = Menu(width_multiple=8, windows=(4,))


@pytest.fixture(scope="session")
def sentences(tiny_tokenizer):
    """Rows of 32 tokens of English [64, 32]."""
    from conftest import ENGLISH

    ids = tiny_tokenizer(ENGLISH.read_text(encoding="utf-8")[:20000]).input_ids
    return torch.tensor(ids[: 64 * 32]).view(64, 32)


@pytest.fixture(scope="session")
def parent(tiny_model):
    """Return (family, **config) -> a parent of three layers, its weights large enough to matter.

    In float64, mixtures in float32: torch multiplies groups of experts in no other way.
    """

    def make(family="llama", **changes):
        changes = {"num_hidden_layers": 3, "num_key_value_heads": 4, "initializer_range": 0.2} | changes
        dtype = torch.float32 if family in ("mixtral", "qwen3-moe", "olmoe") else torch.float64
        return tiny_model(family, dtype=dtype, **changes).eval()

    return make


@pytest.fixture(scope="session")
def library(parent, sentences, tmp_path_factory):
    """Return (family, **config) -> its library, made once for each."""
    made = {}

    def make(family="llama", menu=MENU, **changes):
        key = (family, menu, *sorted(changes.items()))
        if key not in made:
            whole = WholeParent(parent(family, **changes))
            folder = tmp_path_factory.mktemp("library") / "blocks"
            made[key] = Library.create(folder, config=whole.config, space=whole.space(menu), made_from="test")
            calibrate(whole, sentences, made[key], Calibration(batch_rows=8))
        return made[key]

    return make
