"""Every method at once over four ranks, each group a view of the same ones: the numbers of one process."""

import pytest
import torch

from planish.comm.world import ALONE
from train.rank_steps import train_in_float64

STEPS, ROWS = 10, 8
EVERYTHING = [
    ("plan.vocab.method", "ring"),
    ("plan.vocab.tile_bytes", 2**16),
    ("plan.dispatch.method", "pipelined"),
    ("plan.dispatch.borrow_routes", 1),
    ("plan.dispatch.block_rows", 13),
    ("plan.boundary.method", "offload"),
    ("plan.boundary.disk", "4MiB"),
    ("plan.optim.method", "stream-adamw"),
    ("plan.optim.disk", "64MiB"),
    ("plan.optim.chunk_bytes", 2**14),
]
TILED = [("plan.activation.method", "tiled"), ("plan.activation.tile_bytes", 2**12)]
ALONE_TOO = [("plan.dispatch.method", "pipelined"), ("train.clip", 0.5), ("train.steps", STEPS)]
SIX = {"num_experts": 6}
MESH = {"dp": 4, "cp": 2, "ep": 4, "vp": 2}
FAST = [("qwen3-moe", MESH, SIX, [])]
SLOW = [
    ("qwen3-moe", {"dp": 4, "cp": 4, "ep": 2, "vp": 4}, SIX, [("plan.boundary.keep_attention", True)]),
    ("qwen3-moe", {"dp": 2, "replicate": 2, "cp": 2, "ep": 2, "vp": 2}, SIX, []),
    ("deepseek-v3", MESH, {}, TILED),
    ("deepseek-v3", {"dp": 4, "cp": 4, "ep": 4, "vp": 4}, {}, TILED),
]
pytestmark = pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")


@pytest.mark.parametrize(
    ("family", "mesh", "config", "settings"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_everything_together_is_one_process(
    run_of, tiny_model, tiny_tokenizer, text_file, ranks, tmp_path, family, mesh, config, settings
):
    """Sharded weights, spans of rows, experts, vocabulary, far boundaries and far optimizer state, accumulation,
    clipping and evaluation."""
    same = [*ALONE_TOO, ("train.global_tokens", ROWS * 16), ("data.eval", [str(text_file)]), ("data.eval_tokens", 112)]
    folders = [(f"plan.{peak}.folder", str(tmp_path)) for peak in ("boundary", "optim")]
    one = run_of(family, None, *same, **config)
    many = run_of(family, mesh, *same, *EVERYTHING, *folders, *settings, **config)

    def trained(run, world):
        return train_in_float64(run, tiny_model(family, dtype=torch.float64, **config), tiny_tokenizer, world)

    tolerance = 1e-6 if family == "deepseek-v3" else 1e-10  # which routes in float32, whatever the model's dtype
    expected, weights = trained(one, ALONE)
    assert len(expected) == STEPS + 1
    assert any(norm > one.train.clip for _, norm, *_ in expected[:STEPS])
    for found, found_weights in ranks(lambda world: trained(many, world), **mesh):
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=tolerance)
        for name, weight in weights.items():
            assert torch.allclose(found_weights[name], weight, rtol=tolerance, atol=tolerance), name
