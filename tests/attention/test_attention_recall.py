"""Attention that is kept is not computed again where its layer is, in every kind of attention, and no bit changes."""

import pytest
import torch

from planish.methods import Checkpoint, Offload, Plain, Plan
from planish.models.install import install
from planish.peaks.attention import kernel

ROWS, TOKENS, LAYERS = 2, 12, 2
BOUNDS = (0, 5, 12, 17, 24)
WAYS = {
    "computed again": lambda _: Checkpoint(),
    "kept on the device": lambda _: Checkpoint(keep_attention=True),
    "kept on disk": lambda folder: Offload(disk=2**20, folder=folder, keep_attention=True),
}


@pytest.fixture
def computed(monkeypatch):
    """Return a list that grows with each attention that is computed."""
    calls = []
    compute = kernel._compute
    monkeypatch.setattr(kernel, "_compute", lambda *args: calls.append(1) or compute(*args))
    return calls


@pytest.fixture
def step(request, make_model, tmp_path, computed):
    """Return the losses and gradients of two microbatches with an evaluation between, and how often attention ran."""

    def run(family, way, *, dtype=torch.float32, reentrant=False, backwards=1):
        model = make_model(family, dtype)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        plan = Plan(vocab=Plain(), boundary=WAYS[way](tmp_path))
        request.addfinalizer(install(model, plan, tokens=ROWS * TOKENS).undo)
        computed.clear()
        found = []
        for seed in range(2):
            ids = torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(seed))
            batch = {"input_ids": ids, "labels": ids, "cu_seq_lens_q": BOUNDS, "use_cache": False}
            loss = model(**batch).loss
            with torch.no_grad():
                found.append(model(**batch).loss)
            for left in reversed(range(backwards)):
                loss.backward(retain_graph=left > 0)
            found.append(loss.detach())
        return [*found, *(each.grad for each in model.parameters())], len(computed) // 2 - LAYERS

    return run


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_that_is_kept_is_computed_once(step, family, dtype, reentrant):
    expected, computed = step(family, "computed again", dtype=dtype, reentrant=reentrant)
    assert computed == 2 * LAYERS
    for way, again in (("kept on the device", 0), ("kept on disk", 1)):  # the last layer's input stays on the device
        ours, computed = step(family, way, dtype=dtype, reentrant=reentrant)
        assert equal(ours, expected), way
        assert computed == LAYERS + again


def test_a_retained_graph_finds_what_is_on_disk_again(step):
    expected, _ = step("llama", "computed again", backwards=3)
    for way, again in (("kept on the device", 2 * LAYERS), ("kept on disk", 3)):
        ours, computed = step("llama", way, backwards=3)
        assert equal(ours, expected)
        assert computed == LAYERS + again


@pytest.mark.parametrize("way", ["kept on the device", "kept on disk"])
def test_attention_that_is_changed_in_place_after_it_was_kept_is_refused(step, way, monkeypatch):
    forward = kernel.Attention.apply

    def spoil(*args):
        out = forward(*args)
        with torch.no_grad():
            out.add_(1)
        return out

    monkeypatch.setattr(kernel.Attention, "apply", spoil)
    with pytest.raises(RuntimeError, match="or what it keeps, was changed in place"):
        step("llama", way)
