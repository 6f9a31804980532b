"""Training over ranks: the numbers of one process, shards without padding, checkpoints for any number of ranks."""

import dataclasses
from contextlib import ExitStack

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from planish.comm.world import ALONE
from planish.errors import PlanishError, UsageError
from planish.memory.ledger import Ledger
from planish.sections import MeshSection
from planish.train.engine import build_engine
from planish.train.facts import MeasuredFacts
from planish.train.job import RankFeed, open_run_feed
from planish.train.spread import local
from train.rank_steps import next_losses, train_and_save, train_in_float64

MESHES = [{"dp": 2}, {"dp": 3}, {"replicate": 2}, {"replicate": 2, "dp": 2}]


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_compute_what_one_process_computes(run_of, tiny_model, tiny_tokenizer, ranks, family, mesh):
    config = {"num_experts": 6} if family == "qwen3-moe" else {}
    settings = [("plan.dispatch", "batched")] if family == "qwen3-moe" else []
    one, many = run_of(family, None, *settings, **config), run_of(family, mesh, *settings, **config)

    def model():
        return tiny_model(family, dtype=torch.float64, **config)

    expected, weights = train_in_float64(one, model(), tiny_tokenizer, ALONE)
    for found, found_weights in ranks(lambda world: train_in_float64(many, model(), tiny_tokenizer, world), **mesh):
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=1e-12)
        for name, weight in weights.items():
            assert torch.allclose(found_weights[name], weight, rtol=1e-10, atol=1e-12), name


def test_experts_are_sharded_without_padding(run_of, tiny_model, ranks):
    run = run_of("qwen3-moe", {"dp": 4}, num_experts=2)

    def shapes(world):
        with ExitStack() as scope:
            model = tiny_model("qwen3-moe", num_experts=2)
            build_engine(
                lambda: model, run.plan, tokens=16, ledger=Ledger(), facts=MeasuredFacts(), scope=scope, world=world
            )
            return [(each.shape, local(each).numel()) for each in model.parameters() if isinstance(each, DTensor)]

    for found in ranks(shapes, dp=4):
        assert len(found) == len(list(tiny_model("qwen3-moe", num_experts=2).parameters()))
        assert all(4 * numel == shape.numel() for shape, numel in found)


@pytest.mark.parametrize(("family", "dtype"), [("llama", "fp32"), ("qwen3-moe", "bf16")])
def test_a_checkpoint_goes_on_over_any_number_of_ranks(run_of, ranks, text_file, family, dtype):
    settings = [("model.dtype", dtype), ("data.eval", [str(text_file)]), ("data.eval_tokens", 16 * 7)]
    first = run_of(family, {"dp": 4}, *settings)
    later = [dataclasses.replace(first, mesh=MeshSection(dp=dp)) for dp in (4, 2, 1)]
    later = [dataclasses.replace(run, train=dataclasses.replace(run.train, steps=5)) for run in later]
    ranks(lambda world: train_and_save(first, world), dp=4)
    model = AutoModelForCausalLM.from_pretrained(first.save.dir / "checkpoints" / "step-00000003")
    assert all(torch.isfinite(each).all() for each in model.parameters())
    four, two, [one] = (ranks(lambda world, run=run: next_losses(run, world), dp=run.mesh.dp) for run in later)
    assert len(set(four)) == len(set(two)) == 1  # every rank reports the same
    unit = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for found in (four[0], two[0]):
        assert found == pytest.approx(one, rel=4 * torch.finfo(unit).eps)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_takes_the_others_with_it(ranks, failing):
    def work(world):
        try:
            with world.guarded():
                if world.rank == failing:
                    raise UsageError("no such file.")
                world.barrier()
        except PlanishError as error:
            return type(error), str(error)

    for rank, (kind, sentence) in enumerate(ranks(work, dp=3, timeout_s=20)):
        assert kind is UsageError
        assert sentence == ("no such file." if rank == failing else f"rank {failing} stopped: no such file.")


def test_ranks_with_other_settings_are_named(ranks):
    def work(world):
        try:
            world.require_same({"settings": "a" if world.rank != 1 else "b"})
        except UsageError as error:
            return str(error)

    for sentence in ranks(work, dp=3):
        assert sentence.startswith("rank 1 and rank 0 differ in settings;")


def test_rows_of_a_batch_are_those_of_the_whole(run_of, tiny_tokenizer):
    run = run_of()
    whole = open_run_feed(run, tiny_tokenizer, rows=6).next()
    parts = [RankFeed(open_run_feed(run, tiny_tokenizer, rows=6), rank=rank, rows=2).next() for rank in range(3)]
    for name in ("input_ids", "target", "position_ids"):
        assert torch.equal(torch.cat([getattr(each, name) for each in parts]), getattr(whole, name))
    assert sum(each.num_valid for each in parts) == whole.num_valid
    bounds = [32 * rank + bound for rank, each in enumerate(parts) for bound in each.cu_seq_lens[bool(rank) :]]
    assert tuple(bounds) == whole.cu_seq_lens


@pytest.mark.parametrize(("mesh", "size", "words"), [
    ({"dp": 3}, 2, "(1 x 3) must be the 2 ranks that were started; set `mesh.dp = 2` or start 3"),
    ({"replicate": 4}, 6, "must divide the 6 ranks that were started; one of 1, 2, 3, 6."),
])  # fmt: skip
def test_a_mesh_that_is_not_the_ranks_is_refused(run_of, mesh, size, words):
    with pytest.raises(ValueError, match="ranks that were started") as error:
        run_of("llama", {**mesh}).mesh.over(size)
    assert words in str(error.value)


def test_weights_updated_in_backward_report_the_norm_of_all_ranks(run_of, tiny_model, tiny_tokenizer, ranks):
    settings = [("plan.optim", "apollo"), ("plan.optim.in_backward", True), ("train.clip", 0.0)]
    one, two = (run_of("llama", None, *settings, *mesh) for mesh in ((), (("mesh.dp", 2),)))

    def trained(run, world):
        return train_in_float64(run, tiny_model("llama", dtype=torch.float64), tiny_tokenizer, world)

    expected, weights = trained(one, ALONE)
    for found, found_weights in ranks(lambda world: trained(two, world), dp=2):
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=1e-6)  # norms are noted in float32
        assert all(torch.allclose(each, weights[name], rtol=1e-10, atol=1e-12) for name, each in found_weights.items())
