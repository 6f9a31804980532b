"""`planish demo dispatch`: a drawn mixture trained the plain way and pipelined; then what skew does over ranks."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planish.cli.say import say
from planish.decode import method_name
from planish.errors import VerificationFailed
from planish.methods import Dispatch, Pipelined, Plain, Plan
from planish.runfile import DataSection, ModelSection, RunFile, TrainSection
from planish.units import format_bytes

if TYPE_CHECKING:
    from planish.cli.demo import Outcome

_CONTEXT = 1024
_STEPS = 2
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 49152,
    "max_position_embeddings": _CONTEXT,
    "tie_word_embeddings": True,
}
_RANKS, _TOKENS, _EXPERTS, _TOP_K = 8, 4096, 128, 8


def show(measure: Callable[[RunFile, int], "Outcome"]) -> None:
    """Take two steps of a small drawn mixture in both ways, whose losses must agree; then plan skewed layers."""
    say(
        f"A drawn Qwen3-MoE of {_SIZES['num_hidden_layers']} layers and {_SIZES['num_experts']} experts, fp32, "
        f"{_CONTEXT:,} tokens of English a step: {_STEPS} steps with nothing checkpointed."
    )
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "config.json"
        config.write_text(json.dumps(_SIZES | {"model_type": "qwen3_moe"}))
        plain, pipelined = (_trained(config, method, measure) for method in (Plain(), Pipelined(tile_bytes=2**20)))
    less = 1 - pipelined.layer_bytes / plain.layer_bytes
    say(f"   layers hold {less:.0%} less, whatever the router does")
    if any(abs(a - b) > 2**-8 * a for a, b in zip(plain.losses, pipelined.losses, strict=True)):
        raise VerificationFailed(f"pipelined experts gave losses {pipelined.losses}, not {plain.losses}.")
    _over_ranks()


def _trained(config: Path, method: Dispatch, measure: Callable[[RunFile, int], "Outcome"]) -> "Outcome":
    say(f"\nplan.dispatch = {method_name(type(method))}")
    run = RunFile(
        model=ModelSection(config=config, tokenizer="smollm2-135m", dtype="fp32"),
        data=DataSection(train=("builtin:english",), context=_CONTEXT),
        train=TrainSection(steps=_STEPS, schedule="constant"),
        plan=replace(Plan(), boundary=Plain(), dispatch=method),
    )
    found = measure(run, _STEPS)
    losses = ", ".join(f"{loss:.4f}" for loss in found.losses)
    say(
        f"   losses {losses}; layers hold {format_bytes(found.layer_bytes)} at the peak of forward; peak of everything "
        f"{format_bytes(found.peak_bytes)}; {found.seconds:.0f} s"
    )
    return found


def _over_ranks() -> None:
    """Say what the published profiles do to the busiest rank, by owners alone and by our plan."""
    import numpy as np

    from planish.peaks.dispatch.least_loaded import Balance, native_bounds, plan_layer
    from planish.peaks.dispatch.profiles import PUBLISHED
    from planish.price.dispatch_ranks import num_strides

    say(
        f"\nOver {_RANKS} ranks with {_TOKENS:,} tokens each, {_EXPERTS} experts, {_TOP_K} a token, in blocks of "
        f"{_TOKENS:,} rows; p/h: p % of the tokens go to h experts."
    )
    say("   routing     busiest rank / mean: by owners   levelled   most rows at once   blocks   experts lent")
    strides, bounds = num_strides(_TOKENS, _TOKENS, _RANKS), native_bounds(_EXPERTS, _RANKS)
    for profile in PUBLISHED:
        ids = profile.ids(_TOKENS, num_experts=_EXPERTS, top_k=_TOP_K).numpy()
        flat = (ids * strides + (np.arange(_TOKENS) % strides)[:, None]).ravel()
        one = np.bincount(flat, minlength=_EXPERTS * strides).reshape(_EXPERTS, strides)
        counts = np.stack([one] * _RANKS)
        tokens = counts.sum(1) // _TOP_K
        plan = plan_layer(counts, tokens, bounds=bounds, block_rows=_TOKENS, balance=Balance())
        owners = np.add.reduceat(plan.loads.sum(0), bounds[:-1])
        levelled = np.array([plan.arrivals(rank).sum() for rank in range(_RANKS)])
        say(
            f"   {profile.name:9s} {owners.max() / owners.mean():>33.2f} {levelled.max() / levelled.mean():>10.2f} "
            f"{_TOKENS:>12,} or less {len(plan.blocks):>8d} {sum(map(len, plan.foreign(bounds))):>14d}"
        )
