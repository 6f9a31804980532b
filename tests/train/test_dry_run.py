"""The dry run's peaks are the real run's, to the byte, phase by phase."""

from contextlib import ExitStack

import pytest

from planish.memory.ledger import Ledger
from planish.runfile import load
from planish.train import checkpoint
from planish.train.dry_run import dry_run
from planish.train.evaluate import evaluate
from planish.train.job import build
from planish.train.loop import train_step
from planish.train.run_folder import open_run_folder
from planish.train.session import optimizer_tensors

CHANNEL = ("plan.optim.granularity", "channel")
IN_BACKWARD, NO_CLIP = ("plan.optim.in_backward", True), ("train.clip", 0)
TILES = ("plan.activation.tile_bytes", "4KiB")
STREAM = ("plan.optim", "stream-adamw")
CHUNKS = [("plan.optim.disk", "64MiB"), ("plan.optim.chunk_bytes", "40KiB")]
INT8 = ("plan.optim.weights", "int8")
CASES = {
    "dense fp32": ("llama", []),
    "dense bf16": ("llama", [("model.dtype", "bf16")]),
    "dense bf16 pure": ("qwen3", [("model.dtype", "bf16-pure")]),
    "everything kept": ("llama", [("plan.boundary", "plain")]),
    "plain head": ("llama", [("plan.vocab", "plain")]),
    "recompute head": ("llama", [("plan.vocab.strategy", "recompute")]),
    "accumulation": ("llama", [("train.grad_accum", 3)]),
    "rows": ("qwen3", [("train.global_tokens", 128), ("train.grad_accum", 2), ("model.dtype", "bf16")]),
    "windows and softcap": ("gemma2", []),
    "windows and softcap bf16": ("gemma2", [("model.dtype", "bf16"), ("plan.boundary", "plain")]),
    "experts pipelined fp32": ("qwen3-moe", [("plan.dispatch", "pipelined")]),
    "experts pipelined bf16": (
        "qwen3-moe",
        [("plan.dispatch", "pipelined"), ("plan.dispatch.block_rows", 40), ("model.dtype", "bf16")],
    ),
    "experts fp32": ("qwen3-moe", [("plan.dispatch", "batched")]),
    "experts bf16": ("qwen3-moe", [("model.dtype", "bf16"), ("plan.boundary", "plain")]),
    "scaled logits": ("granite", [("train.clip", 0)]),
    "scaled logits bf16, recompute head": (
        "cohere",
        [("plan.vocab.strategy", "recompute"), ("model.dtype", "bf16")],
    ),
    "bf16, gradients in forward": (
        "llama",
        [("plan.vocab.strategy", "gradients-in-forward"), ("model.dtype", "bf16")],
    ),
    "boundaries on disk": ("llama", [("plan.boundary", "offload"), ("plan.boundary.disk", "1MiB")]),
    "some boundaries on disk": (
        "qwen3",
        [("plan.boundary", "offload"), ("plan.boundary.disk", "8KiB"), ("model.dtype", "bf16")],
    ),
    "apollo by channel, pure": ("qwen3", [("plan.optim.proj_rank", 16), CHANNEL, ("model.dtype", "bf16-pure")]),
    "apollo, int8 in backward": ("llama", [INT8, IN_BACKWARD, NO_CLIP, ("model.dtype", "bf16")]),
    "apollo with experts": (
        "qwen3-moe",
        [("plan.optim.proj_rank", 4), ("plan.optim.refresh", "reset"), ("plan.dispatch", "batched")],
    ),
    "apollo in backward, accumulation": ("llama", [IN_BACKWARD, NO_CLIP, CHANNEL, ("train.grad_accum", 2)]),
    "streamed state on disk": ("llama", [STREAM, *CHUNKS, ("model.dtype", "bf16")]),
    "streamed state, some on the host": ("qwen3", [STREAM, *CHUNKS, ("plan.optim.host", "64KiB")]),
    "streamed state in backward": (
        "qwen3-moe",
        [STREAM, *CHUNKS, IN_BACKWARD, NO_CLIP, ("train.grad_accum", 2), ("plan.dispatch", "batched")],
    ),
    "attention kept": ("gemma2", [("plan.boundary", "checkpoint"), ("plan.boundary.keep_attention", True)]),
    "attention kept on disk": (
        "llama",
        [("plan.boundary", "offload"), ("plan.boundary.disk", "1MiB"), ("plan.boundary.keep_attention", True)],
    ),
    "networks in tiles": ("llama", [("plan.activation", "tiled"), TILES, ("model.dtype", "bf16")]),
    "networks in tiles, everything kept": ("gemma2", [("plan.activation", "tiled"), TILES, ("plan.boundary", "plain")]),
    "packed networks": ("nemotron", [("plan.activation", "bitmap"), TILES]),
    "packed networks, everything kept": (
        "nemotron",
        [("plan.activation", "bitmap"), TILES, ("plan.boundary", "plain"), ("model.dtype", "bf16")],
    ),
    "one document a row": ("llama", [("data.pack", "none")]),
}


def measured(run, folder_path):
    """Return the real run's peaks by phase, and the batches that it took."""
    with ExitStack() as scope:
        folder = scope.enter_context(open_run_folder(folder_path, resume=False, overwrite=False))
        folder.begin(run_toml=run.to_toml(), plan_toml=run.plan.to_toml())
        ledger = scope.enter_context(Ledger())
        job = build(run, ledger, scope)
        start = job.feed.position
        records = [train_step(job, step).memory for step in (1, 2)]
        ledger.start_step(2)
        evaluate(job.engine, [next(iter(job.eval_batches()))])
        with ledger.phase("save"):
            checkpoint.save(
                folder, step=2, model=job.engine.anatomy.model, tokenizer=job.tokenizer,
                tensors=optimizer_tensors(job), progress={}, plan=run.plan, keep=1,
            )  # fmt: skip
        records.append(ledger.end_step())
        job.feed.seek(start)
        batches = [job.feed.next() for _ in range(2 * run.train.grad_accum)] + [next(iter(job.eval_batches()))]
    return records, batches


@pytest.mark.parametrize("case", CASES)
def test_dry_run_is_the_ledger_of_the_real_run(model_folder, text_file, tmp_path, case):
    family, settings = CASES[case]
    text = str(text_file)
    base = [("model.from", str(model_folder(family, num_hidden_layers=4))), ("model.dtype", "fp32")]
    base += [("data.train", text), ("data.eval", text), ("data.context", 64)]
    if ("plan.boundary", "offload") in settings:
        base.append(("plan.boundary.folder", str(tmp_path)))
    if STREAM in settings:
        base.append(("plan.optim.folder", str(tmp_path)))
    run = load(None, base + settings)
    records, batches = measured(run, tmp_path / "run")
    dry = dry_run(run, batches=batches)
    for record in records:
        for phase, peak in record.phases.items():
            if phase != "init":
                expected = max(each.phases[phase].peak_bytes for each in records if phase in each.phases)
                assert dry.phases[phase].peak_bytes == expected, phase
                if peak.peak_bytes == expected:
                    assert sum(dry.phases[phase].categories.values()) == expected


def test_the_worst_case_is_no_less_than_a_real_batch(model_folder, text_file, tmp_path):
    text = str(text_file)
    settings = [("model.from", str(model_folder())), ("data.train", text), ("data.eval", text), ("data.context", 64)]
    run = load(None, settings)
    worst, real = dry_run(run), dry_run(run, batches=measured(run, tmp_path / "run")[1])
    assert worst.peak_bytes >= real.peak_bytes


def test_a_dry_run_holds_no_tensor(model_folder, text_file):
    """A context that no real run could hold costs the dry run nothing."""
    folder = model_folder(max_position_embeddings=2**20)
    run = load(None, [("model.from", str(folder)), ("data.train", str(text_file)), ("data.context", "1M")])
    dry = dry_run(run)
    assert dry.phases["forward"].peak_bytes > 2**20 * 32 * 2 * 2
