"""`planish demo activation`: a ReLU^2 network's activations kept as they are, packed, and computed again in tiles."""

import json
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from planish.cli.say import say
from planish.decode import method_name
from planish.errors import VerificationFailed
from planish.methods import Activation, Bitmap, Plain, Plan, Tiled
from planish.runfile import DataSection, ModelSection, RunFile, TrainSection
from planish.units import format_bytes

_CONTEXT = 1024
_STEPS = 2
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 49152,
    "max_position_embeddings": _CONTEXT,
    "tie_word_embeddings": True,
}


def show() -> None:
    """Take two steps of a small drawn nanochat in each way; losses must be the same bits."""
    say(
        f"A drawn nanochat of {_SIZES['num_hidden_layers']} layers with relu^2, fp32, {_CONTEXT:,} tokens of English a "
        f"step: {_STEPS} steps with nothing checkpointed."
    )
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "config.json"
        config.write_text(json.dumps(_SIZES | {"model_type": "nanochat"}))
        found = [_measure(config, method) for method in (Plain(), Bitmap(tile_bytes=2**30), Tiled(tile_bytes=2**20))]
    (losses, plain_bytes), (packed, packed_bytes), (tiled, tiled_bytes) = found
    for name, nbytes in (("packed", packed_bytes), ("in tiles", tiled_bytes)):
        say(f"   {name}: layers hold {1 - nbytes / plain_bytes:.0%} less than {format_bytes(plain_bytes)}")
    if packed != losses:
        raise VerificationFailed(f"packed activations gave losses {packed}, not {losses}.")
    say("   losses with packed activations are the same to the last bit")
    if any(abs(a - b) > 2**-8 * a for a, b in zip(losses, tiled, strict=True)):
        raise VerificationFailed(f"networks in tiles gave losses {tiled}, not {losses}.")


def _measure(config: Path, method: Activation) -> tuple[tuple[float, ...], int]:
    from planish.memory.ledger import Ledger
    from planish.train.job import build
    from planish.train.loop import train_step

    say(f"\nplan.activation = {method_name(type(method))}")
    run = RunFile(
        model=ModelSection(config=config, tokenizer="smollm2-135m", dtype="fp32"),
        data=DataSection(train=("builtin:english",), context=_CONTEXT),
        train=TrainSection(steps=_STEPS, schedule="constant"),
        plan=replace(Plan(), boundary=Plain(), activation=method),
    )
    with ExitStack() as scope:
        ledger = scope.enter_context(Ledger())
        job = build(run, ledger, scope)
        reports = [train_step(job, step) for step in range(1, _STEPS + 1)]
        worst = max((report.memory for report in reports), key=lambda memory: memory.peak_bytes)
        kept = [keeper.last for keeper in job.engine.keepers.values()]
    losses = tuple(report.loss for report in reports)
    forward = worst.phases["forward"].categories
    waiting_bytes = forward.get("layer working set", 0) + forward.get("staging", 0)
    seconds = sum(report.step_s for report in reports)
    say(
        f"   losses {', '.join(f'{loss:.4f}' for loss in losses)}; layers hold {format_bytes(waiting_bytes)} after "
        f"forward; peak of everything {format_bytes(worst.peak_bytes)}; {seconds:.0f} s"
    )
    if kept:
        density = sum(each.density for each in kept) / len(kept)
        say(f"   {density:.0%} of the activations are not zero")
    return losses, waiting_bytes
