"""Experts over ranks in training: the numbers of one process, for ranks that share, copy or lack experts."""

import dataclasses
import json
from contextlib import ExitStack

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

from planish.comm.world import ALONE
from planish.errors import PlanishError, UsageError
from planish.memory.ledger import Ledger
from planish.sections import MeshSection
from planish.train.engine import build_engine
from planish.train.facts import MeasuredFacts
from planish.train.job import RankFeed, open_run_feed
from planish.train.routing import worst
from planish.train.spread import local
from train.rank_steps import next_losses, train_and_save, train_in_float64

PIPELINED = [("plan.dispatch.method", "pipelined"), ("plan.dispatch.borrow_routes", 1)]
BLOCKS = [("plan.dispatch.block_rows", 13)]
SHARED, COPIED, REPLICATED = {"dp": 3, "ep": 3}, {"dp": 4, "ep": 2}, {"replicate": 2, "dp": 2, "ep": 2}
SIX = {"num_experts": 6}
ROUTED_IN_FLOAT32 = ("deepseek-v3", "glm4-moe", "nemotron-h")  # whatever the model's dtype
BESIDE = {  # other methods with experts over ranks
    "ring": ({"dp": 2, "ep": 2, "vp": 2}, [("plan.vocab", "ring")]),
    "streamed": ({"dp": 2, "ep": 2}, [("plan.optim.method", "stream-adamw"), ("plan.optim.disk", "64MiB")]),
    "offloaded": ({"dp": 2, "ep": 2}, [("plan.boundary.method", "offload"), ("plan.boundary.disk", "4MiB")]),
    "kept": ({"dp": 2, "ep": 2}, [("plan.boundary.method", "checkpoint"), ("plan.boundary.keep_attention", True)]),
    "apollo": ({"dp": 2, "ep": 2}, [("plan.optim", "apollo")]),
}
FAST = [("mixtral", SHARED, {}), ("qwen3-moe", COPIED, SIX), ("gpt-oss", {"dp": 2, "ep": 2}, {})]
SLOW = [
    ("qwen3-moe", {"dp": 4, "ep": 4}, SIX),  # two, two, two and none
    ("mixtral", {"dp": 4, "ep": 4}, {}),
    ("mixtral", REPLICATED, {}),
    ("gpt-oss", COPIED, {}),
    *((family, {"dp": 2, "ep": 2}, {}) for family in ("qwen2-moe", "olmoe", "deepseek-v3", "glm4-moe", "nemotron-h")),
]


def engine_of(run, model, world, scope):
    ledger = scope.enter_context(Ledger())
    tokens = run.tokens_per_microbatch
    return build_engine(
        lambda: model, run.plan, tokens=tokens, ledger=ledger, facts=MeasuredFacts(), scope=scope, world=world
    )


@pytest.mark.parametrize(
    ("family", "mesh", "config"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_experts_over_ranks_are_those_of_one_process(run_of, tiny_model, tiny_tokenizer, ranks, family, mesh, config):
    one, many = run_of(family, None, *PIPELINED[:1], **config), run_of(family, mesh, *PIPELINED, *BLOCKS, **config)

    def model():
        return tiny_model(family, dtype=torch.float64, **config)

    expected, weights = train_in_float64(one, model(), tiny_tokenizer, ALONE)
    loose = family in ROUTED_IN_FLOAT32
    for found, found_weights in ranks(lambda world: train_in_float64(many, model(), tiny_tokenizer, world), **mesh):
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=1e-6 if loose else 1e-12)
        for name, weight in weights.items():
            atol = 1e-5 if loose else 1e-12
            assert torch.allclose(found_weights[name], weight, rtol=1e-10, atol=atol), name


@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE)
def test_experts_over_ranks_beside_other_methods(run_of, tiny_model, tiny_tokenizer, ranks, beside):
    mesh, settings = BESIDE[beside]
    alone = settings if beside == "apollo" else []
    one = run_of("mixtral", None, *PIPELINED[:1], *alone)
    many = run_of("mixtral", mesh, *PIPELINED, *BLOCKS, *settings)

    def model():
        return tiny_model("mixtral", dtype=torch.float64)

    expected, weights = train_in_float64(one, model(), tiny_tokenizer, ALONE)
    for found, found_weights in ranks(lambda world: train_in_float64(many, model(), tiny_tokenizer, world), **mesh):
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=1e-9)
        for name, weight in weights.items():
            assert torch.allclose(found_weights[name], weight, rtol=1e-8, atol=1e-9), name


def test_router_logits_and_their_loss_are_those_of_the_rows(run_of, tiny_model, tiny_tokenizer, ranks):
    run = run_of("mixtral", {"dp": 2, "ep": 2}, *PIPELINED)

    def routed(world, rank):
        found = []
        with ExitStack() as scope:
            engine = engine_of(run, tiny_model("mixtral", dtype=torch.float64), world, scope)

            def loss(batch):
                output = engine.anatomy.model(batch.input_ids, output_router_logits=True, use_cache=False)
                found.extend([output.aux_loss.item(), *(each.tolist() for each in output.router_logits)])
                return output.aux_loss

            batch = RankFeed(open_run_feed(run, tiny_tokenizer, rows=4), rank=rank, rows=2).next()
            if engine.spread is None:
                loss(batch)
            else:
                engine.spread.bind(loss)
                engine.spread(batch, last=True)
        return found

    for rank, found in enumerate(ranks(lambda world: routed(world, world.rank), dp=2, ep=2)):
        torch.testing.assert_close(found, routed(ALONE, rank), rtol=1e-10, atol=1e-12)


def test_each_rank_holds_its_experts_alone(run_of, tiny_model, ranks):
    run = run_of("qwen3-moe", {"dp": 4, "ep": 4}, *PIPELINED, **SIX)

    def held(world):
        with ExitStack() as scope:
            engine = engine_of(run, tiny_model("qwen3-moe", **SIX), world, scope)
            params = dict(engine.anatomy.model.named_parameters())
            experts = [each for name, each in params.items() if ".experts." in name]
            assert all(isinstance(each, DTensor) and each.placements[-1] == Shard(0) for each in experts)
            return {len(local(each)) for each in experts}

    assert ranks(held, dp=4, ep=4) == [{2}, {2}, {2}, {0}]


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(run_of, ranks, tmp_path, text_file, dtype):
    held_out = [("data.eval", [str(text_file)]), ("data.eval_tokens", 16 * 7)]
    settings = [*PIPELINED, *BLOCKS, *held_out, ("model.dtype", dtype), ("train.schedule", "constant")]
    first = run_of("qwen3-moe", {"dp": 4, "ep": 4}, *settings, **SIX)
    ranks(lambda world: train_and_save(first, world), dp=4, ep=4)
    folder = first.save.dir / "checkpoints" / "step-00000003"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_experts == 6
    longer = dataclasses.replace(first, train=dataclasses.replace(first.train, steps=5))
    whole = dataclasses.replace(longer, save=dataclasses.replace(first.save, dir=tmp_path / "whole"))
    ranks(lambda world: train_and_save(whole, world), dp=4, ep=4)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "loss" in line]
    assert all(line["moe/max_over_mean"] >= 1 and line["moe/blocks"] > 1 for line in lines)
    assert any(line["moe/spilled_rows"] > 0 for line in lines)
    undisturbed = [line["loss"].hex() for line in lines][3:]
    found = {}
    for dp, ep in ((4, 4), (2, 2), (1, 1)):
        dispatch = dataclasses.replace(longer.plan.dispatch, borrow_routes=1 if ep > 1 else None)
        plan = dataclasses.replace(longer.plan, dispatch=dispatch)
        run = dataclasses.replace(longer, mesh=MeshSection(dp=dp, ep=ep), plan=plan)
        found[ep] = ranks(lambda world, run=run: next_losses(run, world), dp=dp, ep=ep)
    assert all([loss.hex() for loss in each[1:]] == undisturbed for each in found[4])
    unit = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for ep in (4, 2):
        assert found[ep][0] == pytest.approx(found[1][0], rel=4 * torch.finfo(unit).eps)


def test_the_load_is_the_worst_of_any_rank():
    assert worst([{"moe/blocks": 2, "moe/spilled_rows": 5}, {"moe/blocks": 3, "moe/spilled_rows": 1}]) == {
        "moe/blocks": 3,
        "moe/spilled_rows": 5,
    }
    assert worst([{}, {}]) == {}


def test_a_rank_that_fails_inside_a_layer_ends_the_others(run_of, tiny_model, tiny_tokenizer, ranks):
    run = run_of("mixtral", {"dp": 3, "ep": 3}, *PIPELINED)

    def work(world):
        def fail(*_):
            raise UsageError("no such file.")

        model = tiny_model("mixtral")
        if world.rank == 1:
            model.model.layers[1].mlp.gate.register_forward_pre_hook(fail)
        try:
            with world.guarded():
                train_in_float64(run, model, tiny_tokenizer, world)
        except PlanishError as error:
            return type(error), str(error)

    for rank, (kind, sentence) in enumerate(ranks(work, dp=3, ep=3, timeout_s=20)):
        assert kind is UsageError
        assert sentence == ("no such file." if rank == 1 else "rank 1 stopped: no such file.")


@pytest.mark.parametrize(("settings", "words"), [
    ([("mesh.dp", 2), ("mesh.ep", 2)], "`plan.dispatch` = pipelined alone can run; set it"),
    (PIPELINED, "`plan.dispatch.borrow_routes` lends experts to other ranks, which has no effect without `mesh.ep`"),
    ([*PIPELINED[:1], ("plan.dispatch.borrow", 0)], "`plan.dispatch.borrow` lends experts .* leave it out"),
    ([("mesh.dp", 4), ("mesh.ep", 3), *PIPELINED], r"`mesh.ep` \(3\) must divide `mesh.dp` \(4\); one of 1, 2, 4."),
    ([("plan.dispatch.method", "pipelined"), ("plan.dispatch.borrow", -1)], "must be 0 or more, got -1"),
    ([("mesh.dp", 4), ("mesh.ep", 2), *PIPELINED, ("plan.optim", "apollo")], "set `mesh.ep = 4`"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(run_of, settings, words):
    with pytest.raises(UsageError, match=words):
        run_of("mixtral", None, *settings)


@pytest.mark.parametrize(("family", "settings", "words"), [
    ("llama", [], "`mesh.ep` spreads experts, and LlamaForCausalLM has none"),
    ("mixtral", [("plan.dispatch.block_rows", 2)], "must be at least `mesh.ep`, 3: .*; 3 is the smallest that works."),
])  # fmt: skip
def test_models_and_blocks_that_cannot_be_are_refused(run_of, tiny_model, ranks, family, settings, words):
    run = run_of(family, {"dp": 3, "ep": 3}, *PIPELINED, *settings)

    def work(world):
        with pytest.raises(UsageError, match=words), ExitStack() as scope:
            engine_of(run, tiny_model(family), world, scope)
        return True

    assert ranks(work, dp=3, ep=3) == [True] * 3
