"""A vocabulary over ranks in training: the numbers of one process, whoever shares it; checkpoints go on anywhere."""

import dataclasses
from contextlib import ExitStack

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import AutoModelForCausalLM

from planish.comm.world import ALONE
from planish.errors import PlanishError, UsageError
from planish.memory.ledger import Ledger
from planish.methods import Blocked, Ring
from planish.sections import MeshSection
from planish.train.dry_run import dry_run
from planish.train.engine import build_engine
from planish.train.facts import MeasuredFacts
from planish.train.spread import local
from train.rank_steps import next_losses, train_and_save, train_in_float64

RING = [("plan.vocab.method", "ring")]
SHARED, COPIED, REPLICATED = {"dp": 3, "vp": 3}, {"dp": 4, "vp": 2}, {"replicate": 2, "dp": 2, "vp": 2}
SMALL = [("plan.vocab.tile_bytes", 2**16)]
FAST = [
    ("llama", SHARED, []),  # tied; 300 classes
    ("qwen3", COPIED, [("plan.vocab.mode", "weights")]),
    ("gemma2", {"dp": 2, "vp": 2}, [("plan.vocab.mode", "hidden")]),  # its own embedding, a soft cap
]
SLOW = [
    ("llama", REPLICATED, []),
    ("llama", {"dp": 4, "vp": 4}, [("plan.vocab.mode", "gather")]),
    ("granite", {"dp": 2, "vp": 2}, []),
    ("mixtral", {"dp": 4, "vp": 2, "ep": 4}, [("plan.dispatch.method", "pipelined")]),
]
pytestmark = pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")


def engine_of(run, model, world, scope):
    return build_engine(
        lambda: model,
        run.plan,
        tokens=run.tokens_per_microbatch,
        ledger=scope.enter_context(Ledger()),
        facts=MeasuredFacts(),
        scope=scope,
        world=world,
    )


@pytest.mark.parametrize(
    ("family", "mesh", "settings"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_a_vocabulary_over_ranks_is_that_of_one_process(
    run_of, tiny_model, tiny_tokenizer, ranks, family, mesh, settings
):
    alone = [each for each in settings if "vocab" not in each[0]]
    one, many = run_of(family, None, *alone), run_of(family, mesh, *RING, *SMALL, *settings)

    def model():
        return tiny_model(family, dtype=torch.float64)

    loose = family == "gemma2"  # its norms compute in float32, whatever the model's dtype
    expected, weights = train_in_float64(one, model(), tiny_tokenizer, ALONE)
    for found, found_weights in ranks(lambda world: train_in_float64(many, model(), tiny_tokenizer, world), **mesh):
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=1e-8 if loose else 1e-12)
        assert set(found_weights) == set(weights)
        for name, weight in weights.items():
            assert torch.allclose(found_weights[name], weight, rtol=1e-10, atol=1e-6 if loose else 1e-12), name


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_each_rank_holds_its_rows_alone(run_of, tiny_model, ranks, family):
    run = run_of(family, COPIED, *RING)

    def held(world):
        with ExitStack() as scope:
            engine = engine_of(run, tiny_model(family), world, scope)
            model = engine.anatomy.model
            parts = [model.get_input_embeddings().weight, engine.anatomy.head.weight]
            assert (parts[0] is parts[1]) == (family == "llama")
            assert all(isinstance(each, DTensor) and each.placements == (Replicate(), Shard(0)) for each in parts)
            return [len(local(each)) for each in parts]

    assert ranks(held, **COPIED) == [[150, 150]] * 4


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "fp32"), pytest.param("qwen3", "bf16", marks=pytest.mark.slow)]
)
def test_a_checkpoint_goes_on_at_another_number_of_ranks(run_of, ranks, text_file, family, dtype):
    settings = [("model.dtype", dtype), ("data.eval", [str(text_file)]), ("data.eval_tokens", 16 * 7)]
    first = run_of(family, {"dp": 4, "vp": 4}, *RING, *settings)
    ranks(lambda world: train_and_save(first, world), dp=4, vp=4)
    folder = first.save.dir / "checkpoints" / "step-00000003"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(torch.isfinite(each).all() for each in model.parameters())
    longer = dataclasses.replace(first, train=dataclasses.replace(first.train, steps=5))
    found = {}
    for dp, vp in ((4, 4), (4, 2), (1, 1)):
        plan = dataclasses.replace(first.plan, vocab=Ring() if vp > 1 else Blocked())
        run = dataclasses.replace(longer, mesh=MeshSection(dp=dp, vp=vp), plan=plan)
        found[vp] = ranks(lambda world, run=run: next_losses(run, world), dp=dp, vp=vp)
    assert len(set(found[4])) == len(set(found[2])) == 1
    unit = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for vp in (4, 2):
        assert found[vp][0] == pytest.approx(found[1][0], rel=4 * torch.finfo(unit).eps)


def test_a_dry_run_holds_less_with_more_ranks(run_of):
    """The head's share falls with `mesh.vp`: no rank is there, and none needs to be."""
    peaks = {}
    for vp in (1, 64):
        plan = [] if vp == 1 else RING
        run = run_of("llama", {"dp": 64, "vp": vp}, *plan, ("train.global_tokens", 128 * 16), vocab_size=6000)
        peaks[vp] = dry_run(run).phases["head"].peak_bytes
    assert peaks[64] < peaks[1] / 2


def test_a_rank_that_fails_in_the_ring_ends_the_others(run_of, tiny_model, tiny_tokenizer, ranks):
    run = run_of("llama", SHARED, *RING)

    def work(world):
        def fail(*_):
            raise UsageError("no such file.")

        model = tiny_model("llama")
        if world.rank == 1:
            model.model.norm.register_forward_pre_hook(fail)
        try:
            with world.guarded():
                train_in_float64(run, model, tiny_tokenizer, world)
        except PlanishError as error:
            return type(error), str(error)

    for rank, (kind, sentence) in enumerate(ranks(work, **SHARED, timeout_s=20)):
        assert kind is UsageError
        assert sentence == ("no such file." if rank == 1 else "rank 1 stopped: no such file.")


@pytest.mark.parametrize(("settings", "words"), [
    ([("mesh.dp", 2), ("mesh.vp", 2)], r"`mesh.vp` \(2\) and `plan.vocab` = ring go together: set both"),
    (RING, r"`mesh.vp` \(1\) and `plan.vocab` = ring go together: set both"),
    ([("mesh.dp", 4), ("mesh.vp", 3), *RING], r"`mesh.vp` \(3\) must divide `mesh.dp` \(4\); one of 1, 2, 4."),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(run_of, settings, words):
    with pytest.raises(UsageError, match=words):
        run_of("llama", None, *settings)
