"""Experts of every family as transformers' experts interface runs them: ours compute what the eager model does."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.errors import UsageError
from planish.memory.ledger import Ledger
from planish.methods import Checkpoint, Offload, Pipelined, Plain, Plan
from planish.models.install import install

FAMILIES = ("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "deepseek-v3", "glm4-moe", "gpt-oss", "nemotron-h")
TILED = Pipelined(tile_bytes=3000, block_rows=11)


def draw(tiny_model, family, **changes):
    """Return a model in which no matrix is zero (routers begin so)."""
    model = tiny_model(family, **changes).train()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim >= 2:
                param.normal_(std=0.05)
    return model


def plan(dispatch, boundary=None):
    return replace(Plan.plain(), dispatch=dispatch, boundary=boundary or Plain())


def step(model, ids, **inputs):
    model.zero_grad()
    output = model(input_ids=ids, labels=ids, use_cache=False, **inputs)
    output.loss.backward()
    return output, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_close(ours, theirs, tolerance=1e-5):
    assert set(ours) == set(theirs)
    for name, grad in theirs.items():
        scale = grad.abs().max().item()
        torch.testing.assert_close(ours[name], grad, rtol=0, atol=tolerance * scale + 1e-9, msg=name)


def draw_ids(model, rows=2, context=24):
    return torch.randint(0, model.config.vocab_size, (rows, context), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("boundary", [Plain(), Checkpoint()], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_the_eager_models(tiny_model, family, boundary):
    model = draw(tiny_model, family)
    ids = draw_ids(model)
    model.set_experts_implementation("eager")
    expected, grads = step(model, ids)
    installed = install(model, plan(TILED, boundary))
    assert installed.replaced[-1].startswith("experts: eager -> planish")
    got, ours = step(model, ids)
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert_close(ours, grads)
    installed.undo()
    assert model.get_experts_implementation()[""] == "eager"
    again, restored = step(model, ids)
    assert again.loss.equal(expected.loss)
    assert_close(restored, grads, tolerance=1e-7)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_opens_with_the_same_keys(tiny_model, tmp_path, family):
    model = draw(tiny_model, family)
    install(model, plan(Pipelined()))
    model.save_pretrained(tmp_path)
    opened, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert "planish" not in (tmp_path / "config.json").read_text()
    ids = draw_ids(model)
    with torch.no_grad():
        torch.testing.assert_close(opened(ids).logits, model.eval()(ids).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_router_logits_and_their_loss_are_still_there(tiny_model, family):
    model = draw(tiny_model, family)
    ids = draw_ids(model)
    model.set_experts_implementation("eager")
    expected, grads = step(model, ids, output_router_logits=True)
    install(model, plan(TILED, Checkpoint()))
    got, ours = step(model, ids, output_router_logits=True)
    torch.testing.assert_close(got.aux_loss, expected.aux_loss)
    for mine, other in zip(got.router_logits, expected.router_logits, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert_close(ours, grads)


class FlippedTies:
    """All experts tie, until a layer runs again: then noise of one rounding decides."""

    def __init__(self, model, *, noise):
        self._noise, self._seen = noise, set()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.copy_(layer.mlp.gate.weight[0].expand_as(layer.mlp.gate.weight))
                layer.mlp.gate.register_forward_pre_hook(self)

    def __call__(self, gate, args):
        if id(gate) in self._seen:
            with torch.no_grad():
                gate.weight.add_(self._noise * torch.randn(gate.weight.shape))
        self._seen.add(id(gate))


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant", "offload"])
def test_a_layer_that_runs_again_takes_the_experts_that_it_took(tiny_model, tmp_path, kind):
    model = draw(tiny_model, "qwen3-moe")
    FlippedTies(model, noise=0.0)
    ids = draw_ids(model)
    model.set_experts_implementation("eager")
    _, grads = step(model, ids)
    again = draw(tiny_model, "qwen3-moe")
    FlippedTies(again, noise=1e-6)
    boundary = Checkpoint()
    if kind == "reentrant":
        again.activation_checkpointing_enable({"use_reentrant": True})
    elif kind == "offload":
        boundary = Offload(disk=2**20, folder=tmp_path)
    installed = install(again, plan(Pipelined(), boundary), tokens=ids.numel())
    _, ours = step(again, ids)
    assert_close(ours, grads, tolerance=1e-4)
    installed.undo()


def test_without_it_the_gradients_would_be_those_of_another_routing(tiny_model):
    """The test above would notice: transformers' own experts route anew."""
    model, again = draw(tiny_model, "qwen3-moe"), draw(tiny_model, "qwen3-moe")
    FlippedTies(model, noise=0.0)
    FlippedTies(again, noise=1e-6)
    ids = draw_ids(model)
    model.set_experts_implementation("eager")
    _, grads = step(model, ids)
    again.set_experts_implementation("batched_mm")
    again.activation_checkpointing_enable({"use_reentrant": False})
    _, ours = step(again, ids)
    with pytest.raises(AssertionError):
        assert_close(ours, grads, tolerance=1e-2)


@pytest.mark.parametrize(("family", "kind", "runs"), [
    ("mixtral", "non-reentrant", 2), ("qwen3-moe", "non-reentrant", 2), ("gpt-oss", "non-reentrant", 2),
    ("mixtral", "reentrant", 4),
    ("qwen2-moe", "non-reentrant", 4),  # the shared expert, which follows, keeps something
])  # fmt: skip
def test_experts_whose_result_nobody_needs_again_do_not_run_again(tiny_model, family, kind, runs):
    model, loads = draw(tiny_model, family), []
    ids = draw_ids(model)
    installed = install(model, plan(TILED), seen=loads.append)
    expected, grads = step(model, ids)
    installed.undo()
    if kind == "reentrant":
        model.activation_checkpointing_enable({"use_reentrant": True})
    installed = install(model, plan(TILED, Checkpoint()), seen=loads.append)
    loads.clear()
    got, ours = step(model, ids)
    assert len(loads) == runs
    assert got.loss.equal(expected.loss)
    assert [name for name, grad in grads.items() if not ours[name].equal(grad)] == []
    installed.undo()


def test_stopped_layers_leave_nothing_behind(tiny_model):
    model = draw(tiny_model, "mixtral")
    install(model, plan(TILED, Checkpoint()))
    ids, live = draw_ids(model), []
    with Ledger() as ledger:
        ledger.adopt(list(model.parameters()), "parameters")
        for _ in range(12):
            step(model, ids)
            live.append(ledger.live_bytes)
    assert len(set(live[1:])) == 1


def test_counts_are_whole_numbers_in_a_narrow_model(tiny_model):
    """bfloat16 counts to 256; here an expert gets 300 and another 299."""
    loads = []
    model = draw(tiny_model, "qwen3-moe", num_hidden_layers=1).bfloat16()
    install(model, plan(Pipelined()), seen=loads.append)
    with torch.no_grad():
        gate = model.model.layers[0].mlp.gate
        gate.weight.zero_()
        model(draw_ids(model, 1, 300), use_cache=False)
    assert [each.max_over_mean for each in loads] == [300 / (600 / 4)]
    assert (loads[0].spilled, loads[0].blocks) == (0, 1)


def test_a_gate_that_is_not_known_is_named(tiny_model):
    with pytest.raises(UsageError, match="cannot take Qwen3MoeExperts, which uses Tanh"):
        install(tiny_model("qwen3-moe", hidden_act="tanh"), plan(Pipelined()))


def test_a_model_without_experts_stays_as_it_is(tiny_model):
    assert install(tiny_model(), plan(Pipelined())).replaced == ()


def test_two_models_do_not_share_settings(tiny_model):
    one, two = draw(tiny_model, "qwen3-moe"), draw(tiny_model, "qwen3-moe")
    blocks = {"one": [], "two": []}
    first = install(one, plan(Pipelined()), seen=lambda load: blocks["one"].append(load.blocks))
    install(two, plan(Pipelined(block_rows=24)), seen=lambda load: blocks["two"].append(load.blocks))
    ids = draw_ids(one)
    step(one, ids)
    step(two, ids)
    assert blocks == {"one": [1, 1], "two": [2, 2]}
    first.undo()
    step(two, ids)
    assert blocks == {"one": [1, 1], "two": [2, 2, 2, 2]}
