"""Norms in tiles: the bits of transformers' modules forward, their gradients, and bytes that do not grow in float32."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.ledger import Ledger
from planish.methods import Plan, Tiled
from planish.models.install import install
from planish.models.norms import tile_norms
from planish.runfile import load
from planish.train.predict import by_dry_run, predict

KNOWN = ["llama", "qwen3-moe", "deepseek-v3", "gpt-oss", "gemma2", "gemma3", "nemotron-h"]


def norms_of(model):
    return [each for name, each in model.named_modules() if "RMSNorm" in type(each).__name__]


def step(norm, x, grad):
    leaf = x.clone().requires_grad_()
    y = norm(leaf)
    return y.detach(), *torch.autograd.grad(y, [leaf, norm.weight], grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", KNOWN)
def test_norms_in_tiles_are_transformers_own(tiny_model, family, dtype):
    model = tiny_model(family, dtype=dtype)
    plain = {type(each): copy.deepcopy(each) for each in norms_of(model)}
    part = tile_norms(model, 5 * 4 * 32)
    assert part.sentence.startswith(f"{len(norms_of(model))} norms: in tiles")
    generator = torch.Generator().manual_seed(3)
    for norm in norms_of(model):
        other, width = plain[type(norm)], norm.weight.shape[0]
        weight, x, grad = (
            torch.randn(*shape, generator=generator).to(dtype) for shape in ((width,), (2, 11, width), (2, 11, width))
        )
        exact = copy.deepcopy(other).double()
        for each in (norm, other, exact):
            each.weight = torch.nn.Parameter(weight.to(torch.float64 if each is exact else dtype))
        (y, *grads), (y_plain, *grads_plain) = step(norm, x, grad), step(other, x, grad)
        assert torch.equal(y, y_plain)
        reference = step(exact, x.double(), grad.double())[1:]
        for ours, theirs, true in zip(grads, grads_plain, reference, strict=True):
            allowed = 2 * (theirs.double() - true).norm() + torch.finfo(dtype).eps * true.norm()
            assert (ours.double() - true).norm() <= allowed
    part.restore()
    assert all("forward" not in vars(each) for each in norms_of(model))


def test_a_norm_of_another_formula_stays_as_it_is(tiny_model):
    assert tile_norms(tiny_model("nemotron"), 2**20) is None  # its layer norms have a bias


@pytest.mark.parametrize("tokens", [1, 63, 640])
def test_what_is_held_beside_the_tensors_does_not_grow(tiny_model, tokens):
    model = tiny_model("llama", dtype=torch.bfloat16)
    tile_norms(model, 2**12)

    def peaks():
        x = torch.randn(1, tokens, 32).bfloat16().requires_grad_()
        with Ledger() as ledger:
            with ledger.phase("forward"):
                y = model.model.norm(x)
            with ledger.phase("backward"):
                torch.autograd.grad(y, [x, model.model.norm.weight], y)
        return ledger.peak_bytes["forward"], ledger.peak_bytes["backward"]

    forward, backward = peaks()
    rows = 2**12 // (4 * 32)
    narrow, whole = 2 * rows * 4, tokens * 32 * 2
    assert forward == whole + 2 * 2**12 + narrow
    assert backward == 2 * whole + 3 * 2**12 + narrow + 3 * 32 * 4 + 32 * 2
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert peaks() == (forward, backward)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_one_layer_at_a_million_tokens_holds_what_its_price_says(model_folder, family):
    """Every tensor of a layer is linear in the tokens, or fixed; the table was fitted at 40 to 72 tokens."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "max_position_embeddings": 2**20}
    settings = [
        ("model.from", str(model_folder(family, **wide))),
        ("data.train", ["builtin:english"]),
        ("data.context", 2**20),
        ("plan.vocab", "plain"),  # its bytes are arithmetic of their own
        ("plan.dispatch.method", "pipelined"),
    ]
    tiled = [("plan.activation.method", "tiled"), ("plan.activation.norms", True)]
    peaks = {}
    for name, more in (("plain", []), ("tiled", tiled)):
        run = load(None, [*settings, *more])
        found, dry = predict(run, lambda _: None), by_dry_run(run)
        assert found.table is not None
        for phase in ("forward", "backward", "optimizer", "save"):
            scalars = 64
            assert 0 <= found.estimate.phases[phase].peak_bytes - dry.phases[phase].peak_bytes <= scalars, phase
        peaks[name] = dry.phases["backward"].peak_bytes
    assert peaks["tiled"] < 0.75 * peaks["plain"]


def test_a_model_trains_in_tiles_as_without(tiny_model):
    def gradients(plan):
        model = tiny_model("qwen3-moe")
        installed = install(model, plan)
        ids = torch.arange(40).view(2, 20)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        installed.undo()
        return loss.item(), [each.grad for each in model.parameters()]

    loss, grads = gradients(Plan())
    tiled_loss, tiled_grads = gradients(Plan(activation=Tiled(norms=True, tile_bytes=2**10)))
    assert tiled_loss == loss
    for ours, theirs in zip(tiled_grads, grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
