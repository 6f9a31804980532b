"""Methods inside stages: those that move or keep data change no bit, adapters learn as on one process."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from planish.comm.world import ALONE
from planish.memory.ledger import Ledger
from planish.methods import Checkpoint, Offload, Pipeline, Plan, StreamAdamW
from planish.models.adapter import add_adapter
from planish.sections import AdapterSection, MeshSection
from planish.train.job import build
from planish.train.loop import train_step
from planish.train.spread import local
from train.rank_steps import next_losses, train_and_save, train_in_float64

LAYERS = {"num_hidden_layers": 4}


def trained(run, world):
    """Return each step's loss and gradient norm, this rank's weights after them, and the bytes that left."""
    with ExitStack() as scope:
        job = build(run, scope.enter_context(Ledger()), scope, world)
        steps = [train_step(job, step) for step in range(1, 4)]
        weights = [local(param.detach()).clone() for param in job.engine.anatomy.model.parameters()]
        written = sum(tier.written_bytes for tier in job.engine.tiers)
        return [(each.loss.hex(), each.grad_norm.hex()) for each in steps], weights, written


@pytest.mark.parametrize(("family", "method"), [("llama", "1f1b"), ("qwen3-moe", "v-half")])
def test_what_moves_or_is_kept_changes_no_bit(run_of, tmp_path, ranks, family, method):
    settings = [("train.grad_accum", 4), ("model.dtype", "bf16"), ("plan.dispatch", "pipelined")]
    run = run_of(family, {"pp": 2}, *settings, **LAYERS)
    plan = replace(run.plan, pipeline=Pipeline(method=method))
    disk = {"disk": 2**20, "folder": tmp_path}
    plans = [
        *(replace(plan, boundary=each) for each in (Checkpoint(), Checkpoint(keep_attention=True))),
        *(replace(plan, boundary=Offload(**disk, keep_attention=kept)) for kept in (False, True)),
        replace(plan, optim=StreamAdamW(**disk, chunk_bytes=3 * 2**12)),
    ]

    def work(world):
        return [trained(replace(run, plan=each), world) for each in plans]

    for (steps, weights, nothing), *ours in ranks(work, pp=2):
        assert nothing == 0
        for found_steps, found_weights, _ in ours:
            assert found_steps == steps
            assert all(torch.equal(a, b) for a, b in zip(found_weights, weights, strict=True))
        assert 0 == ours[0][2] < ours[1][2] < ours[2][2]


def test_streamed_state_of_a_v_goes_on_with_one_stage_a_rank_and_on_one_rank(run_of, tmp_path, ranks):
    plan = Plan(optim=StreamAdamW(disk=2**22, folder=tmp_path, chunk_bytes=3 * 2**12))
    first = replace(run_of("llama", {"pp": 2}, ("train.grad_accum", 3), **LAYERS), plan=plan)
    half = replace(first, plan=replace(plan, pipeline=Pipeline(method="v-half")))
    ranks(lambda world: train_and_save(half, world), pp=2)
    later = [replace(first, mesh=MeshSection(dp=1, pp=pp), train=replace(first.train, steps=5)) for pp in (2, 1)]
    two = ranks(lambda world: next_losses(later[0], world, held_out=False), pp=2)
    [one] = ranks(lambda world: next_losses(later[1], world, held_out=False))
    assert two[0] == two[1] == pytest.approx(one, rel=4 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("method", ["1f1b", "v-half"])
def test_adapters_learn_what_they_learn_on_one_process(run_of, tiny_model, tiny_tokenizer, ranks, method):
    pytest.importorskip("peft")
    settings = [("train.grad_accum", 4), ("model.adapter", {"rank": 4})]
    one = run_of("qwen3", None, *settings, **LAYERS)
    many = run_of("qwen3", None, *settings, ("mesh.pp", 2), ("plan.pipeline", method), **LAYERS)

    def model():
        made = tiny_model("qwen3", **LAYERS)
        made.name_or_path = one.model.from_
        add_adapter(made, AdapterSection(rank=4), base=one.model.from_, seed=0)
        return made.double()

    expected, weights = train_in_float64(one, model(), tiny_tokenizer, ALONE)
    seen = set()
    for found, found_weights in ranks(lambda world: train_in_float64(many, model(), tiny_tokenizer, world), pp=2):
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=1e-12)
        for name, weight in found_weights.items():
            assert torch.allclose(weight, weights[name], rtol=1e-10, atol=1e-12), name
            seen.add(name)
    assert seen == set(weights)
    assert any("lora" in name for name in seen)


def test_an_adapter_of_stages_is_saved_whole_and_goes_on_anywhere(run_of, ranks):
    pytest.importorskip("peft")
    first = run_of("qwen3", {"pp": 2}, ("train.grad_accum", 3), ("model.adapter", {"rank": 4}), **LAYERS)
    ranks(lambda world: train_and_save(first, world), pp=2)
    later = [replace(first, mesh=MeshSection(dp=1, pp=pp), train=replace(first.train, steps=5)) for pp in (2, 1)]
    two = ranks(lambda world: next_losses(later[0], world, held_out=False), pp=2)
    [one] = ranks(lambda world: next_losses(later[1], world, held_out=False))
    assert two[0] == two[1] == pytest.approx(one, rel=4 * torch.finfo(torch.float32).eps)
