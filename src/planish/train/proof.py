"""Proof of a plan that is made for more ranks than there are: its own step on tensors without data, at their number.

[Note: folding] Layers that are alike are run once first, once inside and once last, and once more inside: what two
depths differ by is what each further layer adds, so the peaks of the whole model lie on a line through both. A test
holds this to the full depth on a small model. The head stands in for itself: its tiles would take hours of small
operations, and its bytes are arithmetic that other tests hold to the ledger.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from planish.errors import UsageError
from planish.runfile import RunFile
from planish.train.dry_run import dry_run
from planish.train.engine import Engine
from planish.train.job import span_of
from planish.train.layer_trace import HeadStandIn, full_batch
from planish.train.predict import batch_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Peaks of a step without its head.

    Attributes:
        depths: Layers of the two models that ran.
        peaks: Bytes of each phase, for both.
    """

    depths: tuple[int, int]
    peaks: tuple[Mapping[str, int], Mapping[str, int]]

    def at(self, num_layers: int) -> dict[str, int]:
        """Return each phase's peak for a model of so many layers."""
        (low, high), (first, second) = self.depths, self.peaks
        return {
            phase: nbytes + (second[phase] - nbytes) * (num_layers - low) // (high - low)
            for phase, nbytes in first.items()
            if phase in second
        }


def run_folded(run: RunFile, config: Mapping[str, Any], folder: Path, *, depth: int) -> Folded:
    """Return the peaks of `run` at `depth` layers and one more, head apart.

    Args:
        run: Every setting; its model's config is replaced.
        config: The whole model's config.json.
        folder: Where shortened ones are written.
        depth: Enough for a first layer, each kind of inner ones, and a last.

    Raises:
        UsageError: A step that cannot run on tensors without data.
    """
    depths = (depth, depth + 1)
    peaks = [_peaks(run, shortened(config, each), folder / f"{each}.json") for each in depths]
    return Folded(depths=depths, peaks=(peaks[0], peaks[1]))


def shortened(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a config with the first layers only."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return {**config, "text_config": shortened(text, num_layers)}
    whole = config["num_hidden_layers"]
    cut = {key: each[:num_layers] for key, each in config.items() if isinstance(each, list) and len(each) == whole}
    return {**config, **cut, "num_hidden_layers": num_layers}


def _peaks(run: RunFile, config: Mapping[str, Any], path: Path) -> dict[str, int]:
    path.write_text(json.dumps(config), encoding="utf-8")
    model = replace(run.model, from_=None, gguf=None, config=path)
    short = replace(run, model=model)
    place = run.mesh.cp - 1, run.mesh.cp
    batches = [span_of(full_batch(batch_shape(short)), place) for _ in range(run.train.grad_accum + 1)]
    try:
        found = dry_run(short, batches=batches, adapt=without_head)
    except UsageError:
        raise
    except (ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"the step of this plan cannot run on tensors without data ({reason}).") from error
    return {phase: each.peak_bytes for phase, each in found.phases.items()}


def without_head(engine: Engine) -> Engine:
    """Return an engine whose head allocates its results alone."""
    head = engine.anatomy.head

    def whole(param: Tensor | None) -> Tensor | None:
        return param.to_local() if isinstance(param, DTensor) else param

    def loss(hidden: Tensor, _target: Tensor, _num_valid: int) -> Tensor:
        return HeadStandIn.apply(hidden, whole(head.weight), whole(head.bias), lambda _: None)

    engine = replace(engine, head=loss)
    if engine.spread is not None:
        engine.spread.bind(engine.local_loss)
    return engine
