"""Boundaries that leave the device while ranks shard the weights: the bits of plain checkpointing under FSDP2."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from planish.memory.ledger import Ledger
from planish.methods import Checkpoint, Offload, Plan
from planish.runfile import load
from planish.train.job import build
from planish.train.loop import train_step
from planish.train.spread import local

LAYERS = 4


def trained(run, world):
    """Return each step's loss and gradient norm, this rank's shards after them, and the bytes that left."""
    with ExitStack() as scope:
        job = build(run, scope.enter_context(Ledger()), scope, world)
        steps = [train_step(job, step) for step in (1, 2)]
        shards = [local(param.detach()).clone() for param in job.engine.anatomy.model.parameters()]
        written = [tier.written_bytes for tier in job.engine.tiers]
        return [(each.loss.hex(), each.grad_norm.hex()) for each in steps], shards, written


@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_shards_after_two_steps_are_bitwise_those_of_plain_checkpointing(
    model_folder, text_file, tmp_path, ranks, dtype
):
    settings = [("model.from", str(model_folder(num_hidden_layers=LAYERS))), ("model.dtype", dtype)]
    settings += [("data.train", [str(text_file)]), ("data.context", 16), ("train.global_tokens", 8 * 16)]
    run = load(None, [*settings, ("train.grad_accum", 2), ("train.lr", 1e-2), ("mesh.dp", 2)])
    disk = {"disk": 2**20, "folder": tmp_path}
    boundaries = [Checkpoint(), Checkpoint(keep_attention=True), Offload(**disk), Offload(**disk, keep_attention=True)]

    def work(world):
        return [trained(replace(run, plan=Plan(boundary=each)), world) for each in boundaries]

    for (steps, shards, nothing), *ours in ranks(work, dp=2):
        assert nothing == []
        for found_steps, found_shards, _ in ours:
            assert found_steps == steps
            assert all(torch.equal(a, b) for a, b in zip(found_shards, shards, strict=True))
        itemsize = 4 if dtype == "fp32" else 2
        assert ours[1][2] == [2 * 2 * (LAYERS - 1) * 2 * 16 * 32 * itemsize]
