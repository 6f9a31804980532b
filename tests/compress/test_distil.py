"""Blockwise distillation: its losses as formulas, the same result in any company, better blocks."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.compress.blocks import Blocks
from planish.compress.costs import Costs, Numbers, model_parameters
from planish.compress.distil import distil, distil_bytes
from planish.compress.judge import Judge
from planish.compress.library import Library, pair_name
from planish.compress.likely import block_names, likely, pairs_of
from planish.compress.make import make_library
from planish.compress.measure import sizes_of
from planish.compress.parent import StreamedParent, WholeParent
from planish.compress.pupil import Distillation, Lesson, Pupil, block_loss
from planish.compress.realise import assemble, write_child
from planish.compress.scores import Scoring, local_table, score, score_pairs
from planish.compress.search import Ceiling, search
from planish.compress.settle import quality
from planish.compress.space import Choice, KeepHeads, Menu, NoAttention, NoFfn, Width
from planish.compress.stack import Stack
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


def test_layer_by_layer_is_what_all_at_once_would_be(run, library, parent, sentences):
    """Blocks of two layers in turns, step by step, on states that one run of the whole model gave."""
    base, model = library(), WholeParent(parent())
    _, trained, _ = run("in-turn", names=(NAMES[0], NAMES[3]))
    hidden, lessons = torch.nn.functional.embedding(sentences, model.ends()["embedding"]), []
    with torch.no_grad():
        for index in range(3):
            with model.layer(index) as layer:
                attend = layer.self_attn(layer.input_layernorm(hidden), **model.blocks.around_call(layer, hidden))[0]
                between = hidden + attend
                after = between + layer.mlp(layer.post_attention_layernorm(between))
                lessons.append(Lesson(teacher=layer, before=hidden, between=between, after=after))
            hidden = after
    wanted = {
        NAMES[0]: (0, "ffn", Choice(attention=NoAttention(), ffn=Width(width=16))),
        NAMES[3]: (2, "attention", Choice(attention=KeepHeads(kv_heads=1), ffn=NoFfn())),
    }
    pupils = {
        name: Pupil(model, index, kind, choice, base.read(name), lessons[index], SETTINGS)
        for name, (index, kind, choice) in wanted.items()
    }
    for _ in zip(*(each.steps(name) for name, each in pupils.items()), strict=True):
        pass
    for name, each in pupils.items():
        found = each.layer.state_dict()
        for key, tensor in trained.read(name).items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-11)


def test_states_on_disk_change_nothing(run, tmp_path):
    _, here, _ = run("here", names=NAMES[1:3])
    (tmp_path / "far").mkdir()
    _, far, _ = run("there", names=NAMES[1:3], settings=replace(SETTINGS, folder=tmp_path / "far"))
    assert {name: far.info(name).sha256 for name in far} == {name: here.info(name).sha256 for name in here}
    assert list((tmp_path / "far").iterdir()) == []


def test_a_pair_learns_together_and_is_what_its_layer_becomes(run, parent, sentences, tmp_path):
    choice = Choice(attention=KeepHeads(kv_heads=1), ffn=Width(width=16))
    base, alone, _ = run("alone")
    _, trained, results = run("pairs", names=(), pairs={2: [choice]})
    [result] = results
    assert result.name == pair_name(2, choice)
    assert result.after < result.before
    assert trained.info(result.name).error < trained.info(result.name).plain_error
    assert trained.blocks(2, choice) == (result.name,)
    assert trained.blocks(1, choice) == alone.blocks(1, choice)
    assert trained.pairs() == {2: [choice]}
    small = base.space.parent.with_layer(2, choice)
    model, held = parent(), sentences[48:]
    expected = model(held).logits
    lost = [(assemble(each, small)(held).logits - expected).square().mean().item() for each in (base, trained)]
    assert lost[1] < lost[0]
    write_child(trained, small, tmp_path / "child")
    child = AutoModelForCausalLM.from_pretrained(tmp_path / "child")
    assert torch.equal(child(held).logits, assemble(trained, small)(held).logits)
    # Its score is that of the pair as it is, not the sum of blocks that were trained apart.
    judge = Judge(Stack(trained), held[:6])
    scored = score(Stack(trained), judge, Scoring(joint=0))
    assert scored.pairs.keys() == {f"2 {choice.label}"}
    kl = quality(Stack(trained, small), judge).kl
    assert scored.value(2, choice, "kl") == pytest.approx(kl, rel=1e-9)
    assert score_pairs(Stack(trained), judge, Scoring())[f"2 {choice.label}"].kl == pytest.approx(kl, rel=1e-9)
    _, _, again = run("pairs", names=(), pairs={2: [choice]})
    assert again == []


def test_training_goes_where_the_best_children_are(library):
    base = library()
    sizes = sizes_of(base.config, base.space)
    costs = Costs(
        space=base.space,
        numbers=Numbers(),
        machine="",
        prices={},
        ends_s={},
        scenarios={},
        factors={},
        sizes=sizes,
    )
    whole = model_parameters(base.space, base.space.parent, sizes)
    ceiling = Ceiling(kind="parameters", at_most=0.75 * whole)
    choices = likely(base.space, local_table(base), [ceiling], costs)
    best = search(base.space, local_table(base), [ceiling], costs).architecture
    assert all(choice in here for choice, here in zip(best.layers, choices, strict=True))
    names, pairs = block_names(base.space, choices), pairs_of(base.space, choices)
    everything = block_names(base.space, [layer.choices for layer in base.space.layers])
    assert set() < names < everything
    assert all("none" not in name and "linear" not in name for name in everything)
    for index, both in pairs.items():
        own = base.space.layers[index].parent
        assert all(each in choices[index] for each in both)
        assert all(each.attention != own.attention and each.ffn != own.ffn for each in both)


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


def test_states_on_disk_are_not_in_memory(tiny_model, tmp_path):
    model = tiny_model("llama", num_hidden_layers=2, hidden_size=64, head_dim=16, intermediate_size=64).eval()
    model.save_pretrained(tmp_path / "model")
    teacher = StreamedParent(tmp_path / "model", device=torch.device("cpu"))
    menu = Menu(width_multiple=8, widths=(0.5,), kv_heads=(), linear=False)
    rows = torch.randint(1, 300, (96, 256), generator=torch.Generator().manual_seed(0))
    base = make_library(teacher, rows[:8], tmp_path / "base", menu=menu)
    sizes, peaks = (teacher.largest_layer_bytes, teacher.ends_bytes, 4), []
    for folder in (None, tmp_path):
        name = tmp_path / ("here" if folder is None else "far")
        trained = Library.create(name, config=base.config, space=base.space, made_from="bld")
        settings = Distillation(steps=1, batch_rows=1, heldout=0.02, folder=folder)
        with Ledger() as ledger:
            distil(teacher, rows, base, trained, settings)
        peaks.append(max(ledger.run_peak_bytes.values()))
        assert peaks[-1] <= distil_bytes(base.space, 96, 256, settings, sizes)
    assert peaks[0] - peaks[1] > 0.6 * 3 * rows.numel() * 64 * 4
