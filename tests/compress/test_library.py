"""Blocks on disk: whole or not there, resumed, found out when they are damaged."""

import pytest
import torch

from planish.compress.calibrate import Calibration, calibrate
from planish.compress.library import Library, block_name
from planish.compress.parent import WholeParent
from planish.compress.space import Menu, NoAttention
from planish.errors import CheckpointCorrupt, UsageError

FEW = Menu(width_multiple=8, widths=(0.5,), kv_heads=(1,))


@pytest.fixture
def made(parent, sentences, tmp_path):
    whole = WholeParent(parent())

    def make(made_from="here", menu=FEW):
        library = Library.create(tmp_path, config=whole.config, space=whole.space(menu), made_from=made_from)
        calibrate(whole, sentences[:8], library, Calibration())
        return library

    return make


def bytes_of(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.glob("*.safetensors")}


def test_a_library_goes_on_where_it_stopped(made):
    library = made()
    before = bytes_of(library.folder)
    assert len(before) == 1 + 3 * (2 + 2 + 2 + 2)
    index = library.folder / "blocks.jsonl"
    for name in ("layer-001-ffn-width24", "layer-002-attention-kv1"):
        (library.folder / f"{name}.safetensors").unlink()
    lines = index.read_text().splitlines(keepends=True)
    index.write_text("".join(lines[:-1]) + lines[-1][:20])
    again = made()
    after = bytes_of(again.folder)
    assert {name: each[1] for name, each in after.items()} == {name: each[1] for name, each in before.items()}
    written = {name for name in after if after[name][0] != before[name][0]}
    assert {"layer-001-ffn-width24.safetensors", "layer-002-attention-kv1.safetensors"} < written
    assert len(written) == 3
    assert {name: again.info(name) for name in again} == {name: library.info(name) for name in library}
    assert set(Library(library.folder)) == set(library)


def test_a_library_of_something_else_is_not_mixed_in(made):
    made()
    with pytest.raises(UsageError, match=r"was made from another model, text or settings; name another folder"):
        made(made_from="there")
    with pytest.raises(UsageError, match=r"was made from another model, text or settings"):
        made(menu=Menu(width_multiple=8))


def test_a_damaged_block_is_named(made):
    folder = made().folder
    path = folder / "layer-001-ffn-width24.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    library = Library(folder)
    choice = library.space.layers[1].parent
    assert set(library.layer(1, choice)) > {"self_attn.q_proj.weight", "mlp.down_proj.weight"}
    with pytest.raises(CheckpointCorrupt, match=r"layer-001-ffn-width24.safetensors is not what was written"):
        library.read("layer-001-ffn-width24")
    with pytest.raises(CheckpointCorrupt, match=r"layer-001-ffn-width24.safetensors is not what was written"):
        library.read_tensor("layer-001-ffn-width24", "mlp.up_proj.weight")


def test_what_is_not_there_is_said(made, tmp_path):
    library = made()
    with pytest.raises(UsageError, match=r"has no block layer-000-ffn-width99; let `planish compress` finish it"):
        library.read("layer-000-ffn-width99")
    with pytest.raises(UsageError, match=r"holds no library of blocks"):
        Library(tmp_path / "nowhere")
    assert library.read(block_name(0, "attention", NoAttention())) == {}


def test_too_few_rows_are_refused(parent, sentences, tmp_path):
    whole = WholeParent(parent())
    library = Library.create(tmp_path, config=whole.config, space=whole.space(FEW), made_from="x")
    with pytest.raises(
        UsageError, match=r"`calibration.rows` = 2 leaves none to fit beside those that choose and judge"
    ):
        calibrate(whole, sentences[:2], library, Calibration())
    with pytest.raises(ValueError, match=r"`heldout` must be between 0 and 1, got 1"):
        Calibration(heldout=1)
    assert torch.is_tensor(sentences)
