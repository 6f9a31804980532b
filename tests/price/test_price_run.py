"""A run's price is its dry run, phase by phase: some of its layers at a few lengths say what all of them hold."""

import re
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from forks import run_in_child
from planish.plan.estimate import estimate
from planish.price.store import PRESETS
from planish.price.table import LayerTable
from planish.runfile import load
from planish.sections import TrainSection
from planish.train import layer_table, predict
from planish.train.dry_run import dry_run
from planish.train.layer_trace import full_batch
from planish.train.predict import batch_shape, by_dry_run, keeps_master, table_of

UNTIED = {"tie_word_embeddings": False}
DEEP = {"num_hidden_layers": 4}
MIXED = {"mlp_only_layers": [0, 2], "num_hidden_layers": 4}
FP32, BF16, PURE = (("model.dtype", dtype) for dtype in ("fp32", "bf16", "bf16-pure"))
KEPT = ("plan.boundary", "plain")
PLAIN_HEAD, RECOMPUTE = ("plan.vocab", "plain"), ("plan.vocab.strategy", "recompute")
IN_FORWARD = ("plan.vocab.strategy", "gradients-in-forward")
BATCHED, PIPELINED = (("plan.dispatch", dispatch) for dispatch in ("batched", "pipelined"))
SMALL_BLOCKS = [PIPELINED, ("plan.dispatch.tile_bytes", 5000), ("plan.dispatch.block_rows", 50)]
PLAIN_ROWS, ONE_ROW = [("train.global_tokens", 128), ("plan.attention", "plain")], TrainSection()
ROWS = [("train.global_tokens", 2 * 3 * 64), ("train.grad_accum", 3)]
RESET = ("plan.optim.refresh", "reset")
TILED = [("plan.activation", "tiled"), ("plan.activation.tile_bytes", 48 * 4 * 5)]
BITMAP, SMALL_TILES = ("plan.activation", "bitmap"), ("plan.activation.tile_bytes", 48 * 2 * 5)
CASES = {
    "networks in tiles": ("llama", [BF16, *TILED], DEEP),
    "networks packed, kept": ("nemotron", [BF16, KEPT, BITMAP, SMALL_TILES, *ROWS], DEEP),
    "pure, rows, accumulation": ("llama", [PURE, RECOMPUTE, *ROWS], DEEP),
    "experts pipelined in blocks": ("qwen3-moe", [BF16, *SMALL_BLOCKS, KEPT, *ROWS], MIXED),
    "windows and softcap": ("gemma2", [FP32, IN_FORWARD, ("train.global_tokens", 128)], DEEP),
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
    "networks in tiles, kept, accumulation": ("gemma2", [FP32, KEPT, *TILED, *ROWS], DEEP),
    "networks in one tile": ("qwen3", [PURE, KEPT, ("plan.activation", "tiled")], DEEP),
    "networks in tiles, relu^2": ("nemotron", [BF16, *TILED], DEEP),
    "networks in tiles, experts beside them": ("qwen3-moe", [FP32, PIPELINED, *TILED], MIXED),
    "shared experts in tiles": ("qwen2-moe", [BF16, PIPELINED, *TILED], DEEP),
    "networks packed": ("nemotron", [FP32, BITMAP, SMALL_TILES], DEEP),
    "networks packed in one tile": ("nemotron", [PURE, BITMAP], DEEP),
    "networks packed in an arena of a given size": (
        "nemotron",
        [BF16, BITMAP, ("plan.activation.arena_bytes", 12345), *ROWS],
        DEEP,
    ),
    "experts pipelined": ("qwen3-moe", [FP32, PIPELINED], DEEP),
    "experts grouped, kept, plain head": ("qwen3-moe", [BF16, KEPT, PLAIN_HEAD], MIXED),
    "tied": ("llama", [FP32], DEEP),
    "untied, kept, plain head": ("llama", [BF16, KEPT, PLAIN_HEAD], UNTIED | DEEP),
    "experts grouped": ("qwen3-moe", [BF16, IN_FORWARD], MIXED),
    "windows and softcap, bf16": ("gemma2", [BF16, ("train.global_tokens", 128)], DEEP),
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
DP2 = ("mesh.dp", 2)
RANKS = {
    "shards, networks in tiles": ("llama", [FP32, *TILED, DP2], DEEP),
    "shards": ("llama", [FP32, DP2], DEEP),
    "copies": ("llama", [BF16, ("mesh.replicate", 2)], DEEP),
}
MORE_RANKS = {
    "uneven shards, experts, accumulation": (
        "qwen3-moe",
        [BF16, ("mesh.dp", 3), ("train.global_tokens", 3 * 3 * 64), ("train.grad_accum", 3)],
        MIXED | {"num_hidden_layers": 6},
    ),
    "shards, experts pipelined, kept": ("qwen3-moe", [FP32, PIPELINED, KEPT, DP2], DEEP),
    "copies of shards, plain head": ("gemma2", [PURE, PLAIN_HEAD, DP2, ("mesh.replicate", 2)], DEEP),
    "shards of two layers": ("cohere", [BF16, DP2], {"num_hidden_layers": 2}),
    "copies, accumulation": (
        "qwen3",
        [BF16, KEPT, ("mesh.replicate", 2), ("train.global_tokens", 6 * 64), ("train.grad_accum", 3)],
        DEEP,
    ),
}
SCALARS = 16


def silent(_sentence):
    pass


def assert_same_holders(price, peak):
    """Compare what parameters and layers hold by name; what modules hold, attention and head share with prices."""
    held = Counter()
    for each in peak.owners:
        held[each.category, re.sub(r"\b\d+\b", "*", each.owner)] += each.total_bytes
    priced = dict(price.owners)
    named = {holder: size for holder, size in held.items() if holder[0] in ("parameters", "gradients", "boundaries")}
    assert {holder: priced[holder] for holder in named if holder in priced}.items() <= named.items()


def assert_equal(run):
    """Compare on whole rows that are all counted."""
    shape = replace(batch_shape(run), num_valid=run.tokens_per_microbatch, split=False)
    table = table_of(run, silent)
    price = estimate(table, shape, run.plan, master=keeps_master(run))
    dry = dry_run(run, batches=[full_batch(shape) for _ in range(run.train.grad_accum + 1)])
    for phase, peak in dry.phases.items():
        assert 0 <= price.phases[phase].peak_bytes - peak.peak_bytes <= SCALARS, phase
        assert sum(price.phases[phase].categories.values()) == price.phases[phase].peak_bytes
        assert_same_holders(price.phases[phase], peak)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)])
def test_the_price_is_the_dry_run(run_of, case):
    family, settings, config = (CASES | MORE)[case]
    assert_equal(run_of(family, *settings, **config))


@pytest.mark.parametrize("case", [*RANKS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_RANKS)])
def test_the_price_of_a_rank_is_its_dry_run(run_of, case):
    """While shards are dealt out the price is a bound; norms of shards are a few scalars each."""
    family, settings, config = (RANKS | MORE_RANKS)[case]
    run = run_of(family, *settings, **config)
    shape = replace(batch_shape(run), num_valid=run.tokens_per_microbatch, split=False)

    def both():
        table = table_of(run, silent)
        dry = dry_run(run, batches=[full_batch(shape) for _ in range(run.train.grad_accum + 1)])
        return estimate(table, shape, run.plan, master=keeps_master(run)), dry.phases, table

    price, dry, table = run_in_child(both)
    for phase, peak in dry.items():
        more = price.phases[phase].peak_bytes - peak.peak_bytes
        assert sum(price.phases[phase].categories.values()) == price.phases[phase].peak_bytes
        if phase == "init":
            assert more >= 0 or not run.mesh.sharded
        else:
            norms = 2 * sum(each.itemsize * each.count for each in table.tensors) if phase == "optimizer" else 0
            assert 0 <= more <= SCALARS + norms, phase


@pytest.mark.parametrize(
    "case",
    ["mini pure", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mini", "by channel, with experts"))],
)
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


STREAM = [("plan.optim", "stream-adamw"), ("plan.optim.disk", "64MiB"), ("plan.optim.chunk_bytes", "24KiB")]
STREAMED = {
    "bf16 on disk": ("llama", [BF16, *STREAM], DEEP),
    "fp32, some on the host": ("llama", [FP32, KEPT, *STREAM, ("plan.optim.host", "100KiB")], UNTIED | DEEP),
    "pure, all on the host": (
        "qwen3",
        [PURE, ("plan.optim", "stream-adamw"), ("plan.optim.host", "1GiB"), *ROWS],
        DEEP,
    ),
    "in one chunk, beside boundaries": (
        "llama",
        [BF16, *STREAM[:2], ("plan.boundary", "offload"), ("plan.boundary.disk", "1MiB"), *ROWS],
        {"num_hidden_layers": 1},
    ),
}


@pytest.mark.parametrize(
    "case", [*list(STREAMED)[:1], *(pytest.param(each, marks=pytest.mark.slow) for each in list(STREAMED)[1:])]
)
def test_streamed_state_is_priced_to_the_byte(run_of, case):
    family, settings, config = STREAMED[case]
    run = run_of(family, *settings, **config)
    assert_equal(run)
    price, dry = predict.predict(run, silent).estimate, by_dry_run(run)
    for name in ("optimizer state", "staging"):
        assert price.phases["forward"].categories.get(name) == dry.phases["forward"].categories.get(name), name


@pytest.mark.parametrize("disk", ["1MiB", pytest.param("9KiB", marks=pytest.mark.slow)])
def test_boundaries_on_disk_are_priced_to_within_one_of_them(run_of, disk):
    run = run_of("llama", BF16, ("plan.boundary", "offload"), ("plan.boundary.disk", disk), **DEEP)
    price, dry = predict.predict(run, silent).estimate, by_dry_run(run)
    boundary_bytes = 64 * 32 * 2
    for phase, peak in dry.phases.items():
        assert 0 <= price.phases[phase].peak_bytes - peak.peak_bytes <= boundary_bytes + SCALARS, phase
    kept = predict.predict(run_of("llama", BF16, **DEEP), silent).estimate
    sizes = [each.phases["head"].categories["boundaries"] for each in (price, kept)]
    assert sizes[0] < sizes[1] == 4 * boundary_bytes


@pytest.mark.parametrize("boundary", ["checkpoint", "offload"])
def test_attention_that_is_kept_is_priced_to_within_one_layer_s(run_of, boundary):
    disk = [("plan.boundary.disk", "1MiB")] if boundary == "offload" else []
    keep = [("plan.boundary", boundary), *disk, ("plan.boundary.keep_attention", True)]
    run, plain = run_of("llama", BF16, *keep, **DEEP), run_of("llama", BF16, **DEEP)
    price, dry = predict.predict(run, silent).estimate, by_dry_run(run)
    boundary_bytes, kept_bytes = 64 * 32 * 2, 64 * 4 * (8 * 2 + 4)
    spare = kept_bytes + (boundary_bytes if disk else 0) + SCALARS
    for phase, peak in dry.phases.items():
        assert 0 <= price.phases[phase].peak_bytes - peak.peak_bytes <= spare, phase
    held = price.phases["head"].categories["boundaries"]
    assert held == (1 * boundary_bytes if disk else 4 * (boundary_bytes + kept_bytes))
    assert held == dry.phases["head"].categories["boundaries"]
    assert predict.predict(plain, silent).estimate.phases["head"].categories["boundaries"] == 4 * boundary_bytes


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
    run = run_of("gemma2", FP32, ("data.context", 200), **DEEP)
    price, dry = predict.predict(run, silent).estimate, by_dry_run(run)
    for phase, peak in dry.phases.items():
        assert peak.peak_bytes <= price.phases[phase].peak_bytes <= 1.005 * peak.peak_bytes, phase


@pytest.mark.slow
@pytest.mark.parametrize("context", [2048, 4096, 8192])
def test_the_built_in_model_is_priced_as_its_dry_run(context):
    assert_equal(load(None, [("model.from", "smollm2-135m"), ("data.train", "none"), ("data.context", context)]))


def test_a_fitted_table_is_kept_and_read_back(run_of, monkeypatch, tmp_path):
    monkeypatch.setattr(predict, "cache_folder", lambda: tmp_path / "cache")
    said, run = [], run_of("llama", BF16, num_hidden_layers=1)
    fitted, read = (predict.table_of(run, said.append) for _ in range(2))
    assert fitted == read == LayerTable.from_dict(fitted.to_dict())
    assert len(said) == 1


def test_a_table_that_the_package_lacks_is_kept_in_the_cache(monkeypatch, tmp_path):
    """Several rows with plain attention: no table of the built-in model says them, and the package stays as it is."""
    monkeypatch.setattr(predict, "cache_folder", lambda: tmp_path / "cache")
    shipped = PRESETS / "smollm2-135m.json"
    before, said = shipped.read_bytes(), []
    run = load(None, [("model.from", "smollm2-135m"), ("data.train", "none"), ("data.context", 64), *PLAIN_ROWS])
    run = replace(run, model=replace(run.model, dtype="bf16"))
    monkeypatch.setattr(
        layer_table, "fit_table", lambda *_args, **_named: predict.read_table(replace(run, train=ONE_ROW))
    )
    assert predict.table_of(run, said.append) == predict.table_of(run, said.append)
    assert len(said) == 1
    assert shipped.read_bytes() == before
    assert list((tmp_path / "cache" / "tables").iterdir())
