"""A dry run of each rank of a pipeline that is not there is the ledger of the rank, phase by phase."""

from contextlib import ExitStack

import numpy as np
import pytest

from forks import run_in_child
from planish.memory.ledger import Ledger
from planish.peaks.vocab.shard import shard_ranges
from planish.runfile import load
from planish.train import checkpoint
from planish.train.dry_run import dry_run
from planish.train.evaluate import evaluate
from planish.train.job import build
from planish.train.loop import train_step
from planish.train.predict import by_dry_run
from planish.train.run_folder import follow_run_folder, open_run_folder
from planish.train.session import optimizer_tensors

CONTEXT, LAYERS, STEPS, VOCAB = 64, 4, 2, 300
PIPELINED = ("plan.dispatch", "pipelined")
CASES = {
    "1f1b fp32": ("llama", {"pp": 2}, [("plan.pipeline", "1f1b"), ("train.grad_accum", 4)]),
    "v-half, vocab-1, experts, bf16": (
        "qwen3-moe",
        {"pp": 2},
        [
            ("plan.pipeline.method", "v-half"),
            ("plan.pipeline.head", "vocab-1"),
            PIPELINED,
            ("model.dtype", "bf16"),
            ("train.grad_accum", 3),
        ],
    ),
    "boundaries, attention and state on disk": (
        "qwen3",
        {"pp": 2},
        [
            ("plan.pipeline", "v-half"),
            ("plan.boundary", "offload"),
            ("plan.boundary.disk", "1MiB"),
            ("plan.boundary.keep_attention", True),
            ("plan.optim", "stream-adamw"),
            ("plan.optim.disk", "4MiB"),
            ("plan.optim.chunk_bytes", "40KiB"),
            ("train.grad_accum", 3),
        ],
    ),
    "adapter": (
        "qwen3",
        {"pp": 2},
        [("plan.pipeline", "v-half"), ("model.adapter", {"rank": 4}), ("train.grad_accum", 3)],
    ),
    "1f1b, everything kept, three ranks": (
        "gemma2",
        {"pp": 3},
        [("plan.pipeline", "1f1b"), ("plan.boundary", "plain"), ("train.grad_accum", 2)],
    ),
    "stages over shards": ("qwen3", {"pp": 2, "dp": 2}, [("plan.pipeline", "1f1b"), ("train.grad_accum", 3)]),
}
SLOW = ("adapter", "1f1b, everything kept, three ranks")
# Whose the rows of the vocabulary are: everybody's in turn, but for cases whose point is another one.
OWNERS = {"v-half, vocab-1, experts, bf16": [0], "boundaries, attention and state on disk": [1], "adapter": [0]}


def own_ids(path, vocab_size, pp, rank):
    """Write ids whose rows are all of one rank, no row twice in a microbatch."""
    rows = shard_ranges(vocab_size, pp)[rank]
    ids = np.arange(max(1, rows.start), rows.stop, dtype="<u2")
    assert len(ids) >= CONTEXT
    np.tile(ids, 40).tofile(path)


def measured(run, world):
    """Return the peaks by phase of each step, an evaluation and a checkpoint, and the batches that were taken."""
    with ExitStack() as scope:
        opened = open_run_folder(run.save.dir, resume=False, overwrite=False) if world.leads else None
        folder = scope.enter_context(opened or follow_run_folder(run.save.dir, resume=False))
        ledger = scope.enter_context(Ledger())
        job = build(run, ledger, scope, world)
        start = job.feed.position
        records = [train_step(job, step).memory for step in range(1, STEPS + 1)]
        ledger.start_step(STEPS)
        evaluate(job.engine, [next(iter(job.eval_batches()))])
        folder.begin(run_toml=run.to_toml(), plan_toml=run.plan.to_toml(), step=0)
        with ledger.phase("save"):
            checkpoint.save(
                folder, step=2, model=job.engine.anatomy.model, tokenizer=job.tokenizer,
                tensors=optimizer_tensors(job), progress={}, plan=run.plan, keep=1, world=world,
            )  # fmt: skip
        records.append(ledger.end_step())
        job.feed.seek(start)
        batches = [job.feed.next() for _ in range(STEPS * run.train.grad_accum)]
        num_params = len(list(job.engine.anatomy.model.parameters()))
    return records, [*batches, next(iter(job.eval_batches()))], num_params


def take_steps(run, world, size):
    """Return the reports of some steps."""
    with ExitStack() as scope:
        job = build(run, scope.enter_context(Ledger()), scope, world)
        return [train_step(job, step) for step in range(1, size + 1)]


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_a_dry_run_of_a_stage_is_the_ledger_of_its_rank(model_folder, tmp_path, ranks, case):
    family, mesh, settings = CASES[case]
    pp, peers = mesh["pp"], mesh.get("dp", 1)
    data = tmp_path / "ids.bin"
    base = [("model.from", str(model_folder(family, num_hidden_layers=LAYERS))), ("model.dtype", "fp32")]
    base += [("data.train", str(data)), ("data.eval", str(data)), ("data.eval_tokens", CONTEXT)]
    base.append(("data.context", CONTEXT))
    if "disk" in case:
        base += [(f"plan.{peak}.folder", str(tmp_path)) for peak in ("boundary", "optim")]
    for owner in OWNERS.get(case, range(pp)):
        own_ids(data, VOCAB, pp, owner)
        folder = ("save.dir", str(tmp_path / f"run-{owner}"))
        run = load(None, [*base, *((f"mesh.{axis}", size) for axis, size in mesh.items()), folder, *settings])
        answers = ranks(lambda world, run=run: measured(run, world), **mesh)[::peers]
        batches = answers[0][1]
        dry_runs = run_in_child(
            lambda run=run, batches=batches: [dry_run(run, batches=batches, rank=i * peers) for i in range(pp)]
        )
        for rank, (dry, (records, _, num_params)) in enumerate(zip(dry_runs, answers, strict=True)):
            # Each parameter has a norm; names and shapes of what a checkpoint holds travel as text.
            small = {"optimizer": 8 * num_params, "save": 600 * (pp + 1) * num_params}
            for phase in ("forward", "head", "backward", "optimizer", "eval", "save"):
                peaks = [each.phases[phase] for each in records if phase in each.phases]
                real = min(peaks, key=lambda peak: peak.peak_bytes)  # gloo's threads may let go a moment late
                found, slack = dry.phases[phase], small.get(phase, 0)
                assert real.peak_bytes <= found.peak_bytes + slack, phase
                if rank == owner:
                    assert found.peak_bytes - real.peak_bytes <= slack, phase
                    if not slack:
                        assert found.categories == real.categories, phase


def test_a_long_step_holds_what_a_short_one_does_and_its_batches(model_folder, text_file):
    base = [("model.from", str(model_folder())), ("data.train", str(text_file)), ("data.context", 64), ("mesh.pp", 2)]

    def peak(microbatches, **dry):
        run = load(None, [*base, ("train.grad_accum", microbatches)])
        return run_in_child(lambda: dry_run(run, rank=1, **dry).phases["backward"])

    short, long = peak(8), peak(40)
    assert long.categories["other"] - short.categories["other"] == 32 * 3 * 8 * 64
    assert long.peak_bytes - short.peak_bytes == 32 * (3 * 8 * 64 + 8)


def test_every_step_stays_within_what_was_told(model_folder, text_file, tmp_path, ranks):
    """Also those whose schedule is made of measured times."""
    base = [("model.from", str(model_folder("qwen3", num_hidden_layers=LAYERS))), ("model.dtype", "fp32")]
    base += [("data.train", str(text_file)), ("data.context", 32), ("mesh.pp", 2), ("train.grad_accum", 5)]
    run = load(None, [*base, ("save.dir", str(tmp_path / "run"))])
    told = run_in_child(lambda: by_dry_run(run))
    assert len(told.ranks) == 2
    assert max(told.ranks) == told.peak_bytes
    for steps in ranks(lambda world: [each.memory.phases for each in take_steps(run, world, 5)], pp=2):
        for phase in ("forward", "head", "backward", "optimizer"):
            scalars = 2**10 if phase == "optimizer" else 0
            later = min(each[phase].peak_bytes for each in steps[2:])  # gloo's threads may let go a moment late
            assert later <= told.phases[phase].peak_bytes + scalars, phase
