"""A run's price is its dry run, phase by phase: some of its layers at a few lengths say what all of them hold."""

from dataclasses import replace
from itertools import product

import pytest

from planish.plan.estimate import estimate
from planish.price.table import LayerTable
from planish.runfile import load
from planish.shapes import BatchShape
from planish.train.dry_run import dry_run
from planish.train.layer_trace import full_batch
from planish.train.predict import batch_shape, by_dry_run, keeps_master, predict, table_of

UNTIED = {"tie_word_embeddings": False}
DEEP = {"num_hidden_layers": 4}
MIXED = {"mlp_only_layers": [0, 2], "num_hidden_layers": 4}
FP32, BF16, PURE = (("model.dtype", dtype) for dtype in ("fp32", "bf16", "bf16-pure"))
KEPT = ("plan.boundary", "plain")
PLAIN_HEAD, RECOMPUTE = ("plan.vocab", "plain"), ("plan.vocab.strategy", "recompute")
IN_FORWARD = ("plan.vocab.strategy", "gradients-in-forward")
BATCHED, PIPELINED = (("plan.dispatch", dispatch) for dispatch in ("batched", "pipelined"))
SMALL_BLOCKS = [PIPELINED, ("plan.dispatch.tile_bytes", 5000), ("plan.dispatch.block_rows", 50)]
ROWS = [("train.global_tokens", 2 * 3 * 64), ("train.grad_accum", 3)]
RESET = ("plan.optim.refresh", "reset")
CASES = {
    "tied": ("llama", [FP32], DEEP),
    "untied, kept, plain head": ("llama", [BF16, KEPT, PLAIN_HEAD], UNTIED | DEEP),
    "pure, rows, accumulation": ("qwen3", [PURE, RECOMPUTE, *ROWS], DEEP),
    "experts grouped": ("qwen3-moe", [BF16, IN_FORWARD], MIXED),
    "windows and softcap": ("gemma2", [BF16, ("train.global_tokens", 128)], DEEP),
    "experts pipelined": ("qwen3-moe", [FP32, PIPELINED], DEEP),
    "experts pipelined in blocks": ("qwen3-moe", [BF16, *SMALL_BLOCKS, KEPT, *ROWS], MIXED),
}
APOLLO = {
    "mini": ("llama", [BF16, KEPT, ("plan.optim", "apollo")], UNTIED | DEEP),
    "mini pure": ("qwen3", [PURE, ("plan.optim", "apollo"), *ROWS], DEEP),
}
APOLLO_EXPERTS = (
    "qwen3-moe",
    [FP32, BATCHED, ("plan.optim.granularity", "channel"), ("plan.optim.proj_rank", 8), RESET],
    DEEP,
)
MORE = {
    "experts batched": ("qwen3-moe", [FP32, BATCHED, KEPT], DEEP),
    "windows and softcap, plain head": ("gemma2", [FP32, KEPT, PLAIN_HEAD], DEEP),
    "scaled logits": ("granite", [BF16, PLAIN_HEAD], {}),
    "nothing bounded": ("llama", [BF16, KEPT, PLAIN_HEAD, ("plan.attention", "plain")], {}),
    "experts with biases": ("gpt-oss", [BF16, PIPELINED], DEEP),
    "shared experts": ("qwen2-moe", [FP32, PIPELINED, KEPT], DEEP),
    "sigmoid routing": ("deepseek-v3", [BF16, PIPELINED], DEEP),
    "one layer": ("llama", [FP32], {"num_hidden_layers": 1}),
    "two layers": ("cohere", [BF16], {"num_hidden_layers": 2}),
}
SCALARS = 16


def silent(_sentence):
    pass


def assert_equal(run):
    """Compare on whole rows that are all counted."""
    shape = replace(batch_shape(run), num_valid=run.tokens_per_microbatch, split=False)
    table = table_of(run, silent)
    price = estimate(table, shape, run.plan, master=keeps_master(run))
    dry = dry_run(run, batches=[full_batch(shape) for _ in range(run.train.grad_accum + 1)])
    for phase, peak in dry.phases.items():
        assert 0 <= price.phases[phase].peak_bytes - peak.peak_bytes <= SCALARS, phase
        assert sum(price.phases[phase].categories.values()) == price.phases[phase].peak_bytes


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
def test_the_price_is_the_dry_run(run_of, case):
    family, settings, config = (CASES | MORE)[case]
    assert_equal(run_of(family, *settings, **config))


@pytest.mark.parametrize("case", [*APOLLO, pytest.param("by channel, with experts", marks=pytest.mark.slow)])
def test_apollo_is_priced_as_its_dry_run_but_for_what_its_step_holds_for_a_moment(run_of, case):
    family, settings, config = APOLLO.get(case, APOLLO_EXPERTS)
    run = run_of(family, *settings, **config)
    shape = replace(batch_shape(run), num_valid=run.tokens_per_microbatch, split=False)
    price = estimate(table_of(run, silent), shape, run.plan, master=keeps_master(run))
    dry = dry_run(run, batches=[full_batch(shape) for _ in range(run.train.grad_accum + 1)])
    for phase, peak in dry.phases.items():
        allowed = 48 * 320 + 4 * 48 * 32 if phase == "optimizer" else SCALARS
        assert 0 <= price.phases[phase].peak_bytes - peak.peak_bytes <= allowed, phase
    state = price.phases["init"].categories["optimizer state"]
    assert state == dry.phases["forward"].categories["optimizer state"]


@pytest.mark.parametrize("disk", ["1MiB", "9KiB"])
def test_boundaries_on_disk_are_priced_to_within_one_of_them(run_of, disk):
    run = run_of("llama", BF16, ("plan.boundary", "offload"), ("plan.boundary.disk", disk), **DEEP)
    price, dry = predict(run, silent).estimate, by_dry_run(run)
    boundary_bytes = 64 * 32 * 2
    for phase, peak in dry.phases.items():
        assert 0 <= price.phases[phase].peak_bytes - peak.peak_bytes <= boundary_bytes + SCALARS, phase
    kept = predict(run_of("llama", BF16, **DEEP), silent).estimate
    sizes = [each.phases["head"].categories["boundaries"] for each in (price, kept)]
    assert sizes[0] < sizes[1] == 4 * boundary_bytes


@pytest.mark.parametrize("boundary", ["checkpoint", "offload"])
def test_attention_that_is_kept_is_priced_to_within_one_layer_s(run_of, boundary):
    disk = [("plan.boundary.disk", "1MiB")] if boundary == "offload" else []
    keep = [("plan.boundary", boundary), *disk, ("plan.boundary.keep_attention", True)]
    run, plain = run_of("llama", BF16, *keep, **DEEP), run_of("llama", BF16, **DEEP)
    price, dry = predict(run, silent).estimate, by_dry_run(run)
    boundary_bytes, kept_bytes = 64 * 32 * 2, 64 * 4 * (8 * 2 + 4)
    spare = kept_bytes + (boundary_bytes if disk else 0) + SCALARS
    for phase, peak in dry.phases.items():
        assert 0 <= price.phases[phase].peak_bytes - peak.peak_bytes <= spare, phase
    held = price.phases["head"].categories["boundaries"]
    assert held == (1 * boundary_bytes if disk else 4 * (boundary_bytes + kept_bytes))
    assert held == dry.phases["head"].categories["boundaries"]
    assert predict(plain, silent).estimate.phases["head"].categories["boundaries"] == 4 * boundary_bytes


FAMILIES = [("llama", {}), ("llama", UNTIED), ("qwen3", {}), ("qwen3-moe", MIXED), ("gemma2", {})]
HEADS = [PLAIN_HEAD, IN_FORWARD, RECOMPUTE]
BATCHES = [[], [("train.grad_accum", 3)], ROWS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "head", "dtype", "boundary", "batch"),
    list(product(FAMILIES, HEADS, (FP32, BF16, PURE), ([], [KEPT]), BATCHES)),
)
def test_the_price_is_the_dry_run_in_every_combination(run_of, family, head, dtype, boundary, batch):
    name, config = family
    experts = [BATCHED] if name == "qwen3-moe" and dtype == FP32 else []
    assert_equal(run_of(name, head, dtype, *boundary, *batch, *experts, **DEEP | config))


def test_the_worst_documents_and_targets_are_those_of_two_dry_runs(run_of):
    run = run_of("gemma2", BF16, ("data.context", 200), **DEEP)
    price, dry = predict(run, silent).estimate, by_dry_run(run)
    for phase, peak in dry.phases.items():
        assert peak.peak_bytes <= price.phases[phase].peak_bytes <= 1.005 * peak.peak_bytes, phase


@pytest.mark.slow
@pytest.mark.parametrize("context", [2048, 4096, 8192])
def test_the_built_in_model_is_priced_as_its_dry_run(context):
    assert_equal(load(None, [("model.from", "smollm2-135m"), ("data.train", "none"), ("data.context", context)]))


def test_a_fitted_table_is_kept_and_read_back(run_of):
    said = []
    run = run_of("llama", BF16)
    fitted, read = (table_of(run, said.append) for _ in range(2))
    assert fitted == read == LayerTable.from_dict(fitted.to_dict())
    assert len(said) == 1
    shape = BatchShape(context=10**6)
    peaks = [estimate(table, shape, run.plan, master=True).peak_bytes for table in (fitted, read)]
    assert peaks[0] == peaks[1] > 10**6 * run_of("llama").rows_per_microbatch
