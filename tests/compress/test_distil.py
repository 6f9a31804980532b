"""Blockwise distillation: its losses as formulas, the same result in any company, better blocks."""

import pytest
import torch

from planish.compress.blocks import Blocks
from planish.compress.distil import Distillation, block_loss, distil, distil_bytes
from planish.compress.library import Library
from planish.compress.make import make_library
from planish.compress.parent import StreamedParent, WholeParent
from planish.compress.realise import assemble
from planish.compress.space import Choice, KeepHeads, Menu, Width
from planish.memory.ledger import Ledger

SETTINGS = Distillation(steps=25, batch_rows=4, lr=1e-2)
NAMES = ("layer-000-ffn-width16", "layer-001-attention-kv1", "layer-002-ffn-width16", "layer-002-attention-kv1")


@pytest.fixture
def run(library, parent, sentences, tmp_path):
    base = library()

    def make(where, names=NAMES, settings=SETTINGS, **deal):
        trained = Library.create(tmp_path / where, config=base.config, space=base.space, made_from="bld")
        results = distil(WholeParent(parent()), sentences, base, trained, settings, chosen=names.__contains__, **deal)
        return base, Library(trained.folder), results

    return make


def test_losses_are_their_formulas():
    expected = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[6.0, 8.0], [1.0, 0.0]]], dtype=torch.float64)
    found = expected.clone()
    found[0, 0, 0] += 1  # loses 1 of 25
    found[1, 1, 1] += 2  # loses 4 of 1
    losses = {kind: block_loss(found, expected, kind).item() for kind in ("plain", "normalised", "batched")}
    assert losses["plain"] == pytest.approx(5 / 8)
    assert losses["normalised"] == pytest.approx(5 / 127, rel=1e-6)
    assert losses["batched"] == pytest.approx((1 / 26 + 4 / 101) / 2, rel=1e-6)
    assert block_loss(found, expected, "vectorwise").item() == pytest.approx((1 / 25 + 4) / 4, rel=1e-5)


def test_trained_blocks_are_better_and_others_as_they_were(run, sentences, parent):
    base, trained, results = run("one")
    assert {each.name for each in results} == set(NAMES)
    assert all(each.after < each.before for each in results)
    assert set(trained) == set(base)
    for name in base:
        if name in NAMES:
            assert trained.info(name).error < base.info(name).error
            assert trained.info(name).made == f"{base.info(name).made}, distilled"
        else:
            assert trained.info(name) == base.info(name)
            assert all(torch.equal(each, base.read(name)[key]) for key, each in trained.read(name).items())
    model = parent()
    small = base.space.parent.with_layer(2, Choice(attention=KeepHeads(kv_heads=1), ffn=Width(width=16)))
    held, expected = sentences[48:], model(sentences[48:]).logits
    lost = [(assemble(each, small)(held).logits - expected).square().mean().item() for each in (base, trained)]
    assert lost[1] < lost[0]


def test_a_block_learns_the_same_in_any_company(run):
    _, together, _ = run("together")
    for name in NAMES[1:3]:
        _, alone, _ = run(f"alone-{name}", names=(name,))
        assert all(torch.equal(each, together.read(name)[key]) for key, each in alone.read(name).items())


def test_ranks_share_the_layers(run):
    _, one, _ = run("one")
    for rank in (2, 0, 1):
        run("three", rank=rank, ranks=3)
    shared = Library(one.folder.parent / "three")
    assert {name: shared.info(name) for name in shared} == {name: one.info(name) for name in one}


def test_interrupted_and_gone_on_with(run):
    _, whole, _ = run("whole")
    folder = whole.folder
    for name in NAMES[2:]:
        (folder / f"{name}.safetensors").unlink()
    _, again, results = run("whole")
    assert {each.name for each in results} == set(NAMES[2:])
    assert {name: again.info(name).sha256 for name in again} == {name: whole.info(name).sha256 for name in whole}


def test_training_that_does_harm_is_not_taken(run):
    base, trained, results = run("harm", settings=Distillation(steps=3, batch_rows=2, lr=30.0))
    assert all(each.after == each.before for each in results)
    assert {name: trained.info(name) for name in trained} == {name: base.info(name) for name in base}


def test_the_parents_weights_and_flags_stay(parent, library, sentences, tmp_path):
    base, model = library(), parent()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    trained = Library.create(tmp_path, config=base.config, space=base.space, made_from="bld")
    distil(WholeParent(model), sentences[:8], base, trained, SETTINGS, chosen=lambda name: name == NAMES[0])
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert all(each.requires_grad and each.grad is None for each in model.parameters())
    assert isinstance(WholeParent(model).blocks, Blocks)


@pytest.mark.parametrize(("context", "batch_rows", "width"), [(64, 2, 192), (256, 4, 192), (16, 1, 400)])
def test_training_holds_no_more_than_was_said(tiny_model, tmp_path, context, batch_rows, width):
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=64, head_dim=16, intermediate_size=width).eval()
    model.save_pretrained(tmp_path / "model")
    teacher = StreamedParent(tmp_path / "model", device=torch.device("cpu"))
    space = teacher.space(Menu(width_multiple=8, widths=(0.75,)))
    rows = torch.randint(1, 300, (8, context), generator=torch.Generator().manual_seed(0))
    base = make_library(teacher, rows, tmp_path / "base", menu=Menu(width_multiple=8, widths=(0.75,)))
    trained = Library.create(tmp_path / "trained", config=base.config, space=space, made_from="bld")
    settings = Distillation(steps=4, batch_rows=batch_rows)
    with Ledger() as ledger:
        distil(teacher, rows, base, trained, settings)
    sizes = teacher.largest_layer_bytes, teacher.ends_bytes, 4
    price, peak = distil_bytes(space, 8, context, settings, sizes), max(ledger.run_peak_bytes.values())
    assert 0.5 * price <= peak <= price
