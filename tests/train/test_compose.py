"""Every method at once over four ranks, each group a view of the same ones: the numbers of one process."""

import dataclasses
import types
from itertools import combinations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from planish.comm.world import ALONE
from planish.methods import Blocked, Plan, Ring
from planish.sections import MeshSection
from train.rank_steps import next_losses, train_and_save, train_in_float64

STEPS, ROWS = 10, 8
RING = [("plan.vocab.method", "ring"), ("plan.vocab.tile_bytes", 2**16)]
IN_STAGES = [("plan.vocab.tile_bytes", 2**16), ("plan.pipeline.method", "1f1b")]
EVERYWHERE = [
    ("plan.dispatch.method", "pipelined"),
    ("plan.dispatch.borrow_routes", 1),
    ("plan.dispatch.block_rows", 13),
    ("plan.boundary.method", "offload"),
    ("plan.boundary.disk", "4MiB"),
    ("plan.optim.method", "stream-adamw"),
    ("plan.optim.disk", "64MiB"),
    ("plan.optim.chunk_bytes", 2**14),
]
EVERYTHING = [*RING, *EVERYWHERE]
TILED = [("plan.activation.method", "tiled"), ("plan.activation.tile_bytes", 2**12)]
ALONE_TOO = [("plan.dispatch.method", "pipelined"), ("train.clip", 0.5), ("train.steps", STEPS)]
SIX = {"num_experts": 6}
MESH = {"dp": 4, "cp": 2, "ep": 4, "vp": 2}
STAGES = {"pp": 2, "dp": 2, "cp": 2, "ep": 2}
LAYERS = {"num_hidden_layers": 4}
SHORT = [("train.steps", 3)]
FAST = [("qwen3-moe", MESH, SIX, SHORT), ("deepseek-v3", STAGES, LAYERS, TILED + SHORT)]
SLOW = [
    ("qwen3-moe", MESH, SIX, []),
    ("qwen3-moe", {"dp": 4, "cp": 4, "ep": 2, "vp": 4}, SIX, [("plan.boundary.keep_attention", True)]),
    ("qwen3-moe", {"dp": 2, "replicate": 2, "cp": 2, "ep": 2, "vp": 2}, SIX, []),
    ("deepseek-v3", MESH, {}, TILED),
    ("deepseek-v3", {"dp": 4, "cp": 4, "ep": 4, "vp": 4}, {}, TILED),
    ("qwen3-moe", STAGES, SIX | LAYERS, []),
    ("deepseek-v3", STAGES, LAYERS, [*TILED, ("plan.boundary.keep_attention", True)]),
]
# Each method: what it needs of the mesh, the peak that it bounds, its settings, and those that it needs of one rank.
METHODS = {
    "cp": ({"cp": 2}, "", [], []),
    "ep": ({"ep": 4}, "plan.dispatch", [("plan.dispatch.borrow_routes", 1), ("plan.dispatch.block_rows", 13)], []),
    "vp": ({"vp": 2}, "plan.vocab", [("plan.vocab.method", "ring"), ("plan.vocab.tile_bytes", 2**16)], []),
    "copies": ({"replicate": 2, "dp": 2}, "", [], []),
    "kept": ({}, "plan.boundary", [("plan.boundary.keep_attention", True)], []),
    "offloaded": ({}, "plan.boundary", [("plan.boundary.method", "offload"), ("plan.boundary.disk", "4MiB")], []),
    "tiled": ({}, "plan.activation", TILED, []),
    "streamed": ({}, "plan.optim", [("plan.optim.method", "stream-adamw"), ("plan.optim.disk", "64MiB")], []),
    "in backward": (
        {},
        "plan.optim",
        [("plan.optim.method", "stream-adamw"), ("plan.optim.disk", "64MiB"), ("plan.optim.in_backward", True)],
        [("train.clip", 0.0)],
    ),
    "apollo": ({}, "plan.optim", [("plan.optim", "apollo")], [("plan.optim", "apollo")]),
}
REFUSED = {("copies", "in backward"), ("ep", "copies")}  # before replicas have summed; four cannot divide two shards
PAIRS = [
    pair
    for pair in combinations(METHODS, 2)
    if pair not in REFUSED and (METHODS[pair[0]][1] != METHODS[pair[1]][1] or not METHODS[pair[0]][1])
]
LONG = [pytest.mark.slow, pytest.mark.timeout(900)]  # six minutes of CPU in stages
pytestmark = pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")


@pytest.fixture
def routed_in_float64(monkeypatch):
    """DeepSeek's router as transformers wrote it, but in float64: it rounds to float32 whatever the model's dtype."""

    class Wide(types.ModuleType):
        float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    theirs = DeepseekV3TopkRouter.forward
    forward = types.FunctionType(theirs.__code__, {**theirs.__globals__, "torch": Wide("torch")})
    monkeypatch.setattr(DeepseekV3TopkRouter, "forward", forward)


@pytest.fixture
def both(run_of, tiny_model, tiny_tokenizer, text_file, ranks, tmp_path):
    """Return (family, mesh, config, settings) -> the numbers and weights of one process, and each rank's."""
    same = [*ALONE_TOO, ("train.global_tokens", ROWS * 16), ("data.eval", [str(text_file)]), ("data.eval_tokens", 112)]
    folders = [(f"plan.{peak}.folder", str(tmp_path)) for peak in ("boundary", "optim")]

    def train(family, mesh, config, settings):
        steps = [each for each in settings if each[0] == "train.steps"]
        one = run_of(family, None, *same, *steps, **config)
        head = IN_STAGES if "pp" in mesh else RING
        many = run_of(family, mesh, *same, *head, *EVERYWHERE, *folders, *settings, **config)

        def trained(run, world):
            model = tiny_model(family, **config).double()  # what transformers keeps in float32 too
            return train_in_float64(run, model, tiny_tokenizer, world)

        return trained(one, ALONE), ranks(lambda world: trained(many, world), **mesh)

    return train


@pytest.mark.parametrize(
    ("family", "mesh", "config", "settings"), [*FAST, *(pytest.param(*each, marks=LONG) for each in SLOW)]
)
@pytest.mark.usefixtures("routed_in_float64")
def test_everything_together_is_one_process(both, family, mesh, config, settings):
    """Sharded weights, spans of rows, experts, vocabulary, stages, far boundaries and far optimizer state,
    accumulation, clipping and evaluation."""
    (expected, weights), many = both(family, mesh, config, settings)
    assert len(expected) == dict([("train.steps", STEPS), *settings])["train.steps"] + 1
    assert any(norm > dict(ALONE_TOO)["train.clip"] for _, norm, *_ in expected[:-1])
    seen = set()
    for found, found_weights in many:
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=1e-10)
        for name, weight in found_weights.items():
            assert torch.allclose(weight, weights[name], rtol=1e-10, atol=1e-10), name
        seen |= set(found_weights)
    assert seen == set(weights)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_any_two_methods_together_are_one_process(run_of, tiny_model, tiny_tokenizer, ranks, tmp_path, pair):
    mesh, settings, alone = {"dp": 4}, [], [("plan.dispatch.method", "pipelined")]
    for name in pair:
        axes, _, more, needed = METHODS[name]
        mesh, settings, alone = mesh | axes, [*settings, *more], [*alone, *needed]
    folders = [(f"{key.rpartition('.')[0]}.folder", str(tmp_path)) for key, _ in settings if key.endswith(".disk")]
    one, many = run_of("qwen2-moe", None, *alone), run_of("qwen2-moe", mesh, *alone, *settings, *folders)

    def trained(run, world):
        return train_in_float64(run, tiny_model("qwen2-moe", dtype=torch.float64), tiny_tokenizer, world)

    tolerance = 1e-6 if "in backward" in pair or "apollo" in pair else 1e-10  # norms and projections in float32
    expected, weights = trained(one, ALONE)
    for found, found_weights in ranks(lambda world: trained(many, world), **mesh):
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=tolerance)
        for name, weight in weights.items():
            assert torch.allclose(found_weights[name], weight, rtol=tolerance, atol=tolerance), name


@pytest.mark.slow
def test_a_checkpoint_of_everything_goes_on_at_any_degrees(run_of, ranks, text_file, tmp_path):
    """4 -> 4, 2 and 1 ranks with other degrees and other methods: the next losses are those of one rank."""
    held_out = [("data.eval", [str(text_file)]), ("data.eval_tokens", 16 * 7)]
    folders = [(f"plan.{peak}.folder", str(tmp_path)) for peak in ("boundary", "optim")]
    settings = [*EVERYTHING, *folders, *held_out, ("train.global_tokens", ROWS * 16), ("train.schedule", "constant")]
    first = run_of("qwen3-moe", MESH, *settings, **SIX)
    ranks(lambda world: train_and_save(first, world), **MESH)
    model, report = AutoModelForCausalLM.from_pretrained(
        first.save.dir / "checkpoints" / "step-00000003", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(torch.isfinite(each).all() for each in model.parameters())
    later = dataclasses.replace(first, train=dataclasses.replace(first.train, steps=5))
    plain = Plan(vocab=Blocked(), dispatch=first.plan.dispatch)
    found = {}
    for mesh, plan in (
        (MESH, first.plan),
        ({"dp": 4, "cp": 4, "ep": 2, "vp": 4}, first.plan),
        ({"dp": 2, "cp": 2, "ep": 2, "vp": 2}, dataclasses.replace(plain, vocab=Ring())),
        ({"dp": 2, "cp": 2}, plain),
        ({"dp": 1}, plain),
    ):
        run = dataclasses.replace(later, mesh=MeshSection(**mesh), plan=plan)
        answers = ranks(lambda world, run=run: next_losses(run, world), **mesh)
        assert len(set(answers)) == 1
        found[str(mesh)] = answers[0]
    one = found.pop("{'dp': 1}")
    for losses in found.values():
        assert losses == pytest.approx(one, rel=8 * torch.finfo(torch.float32).eps)
