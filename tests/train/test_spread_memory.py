"""A dry run over ranks that are not there is the ledger of those that are, phase by phase."""

from contextlib import ExitStack

import pytest

from forks import run_in_child
from planish.memory.ledger import Ledger
from planish.runfile import load
from planish.train.dry_run import dry_run
from planish.train.evaluate import evaluate
from planish.train.job import build
from planish.train.loop import train_step

LAYERS, STEPS = 4, 3
PIPELINED = [("plan.dispatch.method", "pipelined"), ("plan.dispatch.borrow_routes", 1)]
BOTH = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
ODD_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}
CASES = {
    "shards fp32": ("llama", {"dp": 2}, []),
    "uneven shards bf16": ("llama", {"dp": 3}, [("model.dtype", "bf16")]),
    "shards, experts, accumulation": ("qwen3-moe", {"dp": 2}, [("train.grad_accum", 2), ("model.dtype", "bf16")]),
    "shards, everything kept": ("gemma2", {"dp": 2}, [("plan.boundary", "plain"), ("plan.vocab", "plain")]),
    "copies fp32": ("llama", {"replicate": 2}, []),
    "copies, accumulation": ("llama", {"replicate": 2}, [("train.grad_accum", 2), ("model.dtype", "bf16")]),
    "experts over ranks": ("mixtral", {"dp": 2, "ep": 2}, PIPELINED),
    "experts over ranks, kept, bf16": (
        "gpt-oss",
        {"dp": 2, "ep": 2},
        [*PIPELINED, ("plan.boundary", "plain"), ("model.dtype", "bf16"), ("plan.dispatch.block_rows", 33)],
    ),
    "experts over ranks in copies": ("qwen3-moe", {"dp": 4, "ep": 2}, [*PIPELINED, ("train.grad_accum", 2)]),
    "shared vocabulary fp32": ("llama", {"dp": 2, "vp": 2}, [("plan.vocab", "ring")]),
    "copies of a shared vocabulary bf16": (
        "qwen3",
        {"dp": 4, "vp": 2},
        [("plan.vocab", "ring"), ("model.dtype", "bf16"), ("train.grad_accum", 2)],
    ),
    "rows over ranks": ("llama", {"dp": 2, "cp": 2}, []),
    "rows over ranks, groups of them, bf16": (
        "qwen3",
        {"dp": 4, "cp": 2},
        [("model.dtype", "bf16"), ("train.grad_accum", 2), ("plan.boundary.keep_attention", True)],
    ),
    "rows over ranks by spans, and by turns": ("gemma3", {"dp": 2, "cp": 2}, [], ODD_HEADS | BOTH),
    "rows, experts and vocabulary over ranks": (
        "qwen3-moe",
        {"dp": 4, "cp": 2, "ep": 4, "vp": 2},
        [*PIPELINED, ("plan.vocab", "ring"), ("model.dtype", "bf16")],
    ),
    "copies of shards bf16": ("qwen3", {"replicate": 2, "dp": 2}, [("model.dtype", "bf16")]),
}


def measured(run, world):
    """Return each step's peaks by phase, those of an evaluation, and the batches that were taken."""
    with ExitStack() as scope:
        ledger = scope.enter_context(Ledger())
        job = build(run, ledger, scope, world)
        start = job.feed.position
        steps = [train_step(job, step).memory for step in range(1, STEPS + 1)]
        held_out, held_outs = next(iter(job.eval_batches())), []
        for _ in range(STEPS):
            ledger.start_step(STEPS)
            evaluate(job.engine, [held_out])
            held_outs.append(ledger.end_step())
        job.feed.seek(start)
        batches = [job.feed.next() for _ in range(STEPS * run.train.grad_accum)]
        num_params = len(list(job.engine.anatomy.model.parameters()))
    return steps, held_outs, [*batches, held_out], num_params


SLOW = (
    "rows over ranks, groups of them, bf16",
    "experts over ranks in copies",
    "copies of a shared vocabulary bf16",
)


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in CASES]
)
def test_a_dry_run_is_the_ledger_of_the_first_rank_and_no_less_than_that_of_others(
    model_folder, text_file, ranks, case
):
    family, mesh, settings, *config = CASES[case]
    config = {"num_hidden_layers": LAYERS} | (config[0] if config else {})
    base = [("model.from", str(model_folder(family, **config))), ("model.dtype", "fp32")]
    base += [("data.train", str(text_file)), ("data.eval", str(text_file)), ("data.context", 64)]
    run = load(None, [*base, *((f"mesh.{axis}", degree) for axis, degree in mesh.items()), *settings])
    for rank, (steps, held_outs, batches, num_params) in enumerate(ranks(lambda world: measured(run, world), **mesh)):
        dry = run_in_child(lambda batches=batches: dry_run(run, batches=batches))
        for phase in ("forward", "head", "backward", "optimizer", "eval"):
            # The least of several steps: gloo's threads may let go of what they have sent a moment late.
            peaks = [each.phases[phase] for each in (held_outs if phase == "eval" else steps)]
            real = min(peaks, key=lambda peak: peak.peak_bytes)
            # A moment that one of them makes as high as the highest comes first, and says what it holds.
            said = [peak.categories for peak in peaks if peak.peak_bytes == real.peak_bytes]
            scalars = 8 * num_params if phase == "optimizer" else 0
            found = dry.phases[phase]
            assert real.peak_bytes <= found.peak_bytes + scalars, phase
            if rank == mesh.get("cp", 1) - 1:  # with the last span of the first rows
                assert found.peak_bytes - real.peak_bytes <= scalars, phase
                if not scalars:
                    assert found.categories in said, phase


def test_a_process_may_answer_again(model_folder, text_file):
    """DTensor knew the mesh of the first answer, and FSDP2 asked for that of the second."""
    base = [("model.from", str(model_folder("mixtral"))), ("data.train", str(text_file)), ("data.context", 64)]
    run = load(None, [*base, *PIPELINED, ("mesh.dp", 4), ("mesh.ep", 2)])
    first, second = run_in_child(lambda: [dry_run(run).peak_bytes for _ in range(2)])
    assert first == second
