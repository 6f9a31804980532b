"""The pass that makes a library, counted: below its price, within its budget, refused beforehand where it cannot be."""

import pytest
import torch

from planish.compress.calibrate import Calibration, calibrate
from planish.compress.library import Library
from planish.compress.make import library_bytes, make_library
from planish.compress.parent import StreamedParent, WholeParent
from planish.compress.space import Menu
from planish.errors import DoesNotFit
from planish.memory.ledger import Ledger

CPU = torch.device("cpu")
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16, "dtype": torch.float32}
CASES = {
    "solving": {"intermediate_size": 192, "num_key_value_heads": 2},
    "rows": {"intermediate_size": 192, "num_key_value_heads": 2, "context": 512, "batch_rows": 4},
    "bf16 rows": {"intermediate_size": 192, "num_key_value_heads": 2, "context": 256, "batch_rows": 4, "bf16": True},
    "windows": {"intermediate_size": 64, "num_key_value_heads": 2, "context": 512, "batch_rows": 4, "windows": (8, 32)},
    "narrow": {"hidden_size": 32, "head_dim": 8, "intermediate_size": 400, "num_key_value_heads": 2},
    "embedding": {"vocab_size": 20000, "intermediate_size": 32, "num_key_value_heads": 4, "context": 16},
    "experts": {"family": "mixtral", "intermediate_size": 96, "num_key_value_heads": 2, "whole": True},
    "rows of experts": {
        "family": "qwen3-moe",
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_key_value_heads": 2,
        "context": 512,
        "batch_rows": 4,
        "whole": True,
    },
    "in memory": {"intermediate_size": 192, "num_key_value_heads": 2, "whole": True},
}


@pytest.fixture
def setting(tiny_model, tmp_path):
    def make(context=64, batch_rows=2, windows=(), whole=False, bf16=False, family="llama", **changes):
        dtype = torch.bfloat16 if bf16 else torch.float32
        model = tiny_model(family, max_position_embeddings=1024, **(SMALL | changes | {"dtype": dtype})).eval()
        model.save_pretrained(tmp_path / "model")
        parent = WholeParent(model) if whole else StreamedParent(tmp_path / "model", device=CPU)
        rows = torch.randint(1, 300, (8, context), generator=torch.Generator().manual_seed(0))
        return parent, rows, Menu(width_multiple=8, windows=windows), Calibration(batch_rows=batch_rows)

    return make


@pytest.mark.parametrize("case", CASES)
def test_no_more_is_held_than_was_said(setting, tmp_path, case):
    parent, rows, menu, settings = setting(**CASES[case])
    library = Library.create(tmp_path / "l", config=parent.config, space=parent.space(menu), made_from="x")
    with Ledger() as ledger:
        ledger.adopt([rows, *parent.resident()], "other")
        calibrate(parent, rows, library, settings)
    peak, price = max(ledger.run_peak_bytes.values()), library_bytes(parent, rows, menu=menu, settings=settings)
    assert 0.7 * price <= peak <= price


def test_a_budget_holds_and_takes_fewer_rows_at_once(setting, tmp_path):
    parent, rows, menu, settings = setting(**CASES["rows"])
    budget = library_bytes(parent, rows, menu=menu, settings=Calibration(batch_rows=3))
    assert budget < library_bytes(parent, rows, menu=menu, settings=settings)
    done = []
    library = make_library(
        parent,
        rows,
        tmp_path / "l",
        menu=menu,
        settings=settings,
        budget_bytes=budget,
        progress=lambda *where: done.append(where),
    )
    assert done == [(1, 2), (2, 2)]
    again = make_library(parent, rows, tmp_path / "l", menu=menu, settings=settings)
    assert set(again) == set(library)


def test_what_cannot_fit_is_refused_before_anything_is_written(setting, tmp_path):
    parent, rows, menu, settings = setting(**CASES["solving"])
    with pytest.raises(DoesNotFit, match=r"making the library needs .* with one row of 64 tokens at a time, `memory.b"):
        make_library(parent, rows, tmp_path / "l", menu=menu, settings=settings, budget_bytes=2**20)
    assert not (tmp_path / "l").exists()
