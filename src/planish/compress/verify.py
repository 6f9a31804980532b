"""A child's folder measured again: latency, memory and quality beside what was said of it when it was made."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import planish.models.child  # noqa: F401 - lets transformers open children
from planish.compress.costs import Scenario
from planish.compress.judge import Judge, Whole
from planish.compress.measure import Rival
from planish.compress.outcome import RECORD, held_out
from planish.compress.settle import quality
from planish.errors import UsageError
from planish.memory.ledger import Ledger
from planish.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One number beside what was said of it.

    Attributes:
        name: What it is.
        told: As it was said when the child was made.
        found: As it was measured now.
        holds: Whether it is as good as was said.
    """

    name: str
    told: str
    found: str
    holds: bool


def verify(
    folder: Path, *, parent: Path | None = None, rounds: int = 16, slack: float = 0.05, note: Callable[[str], None]
) -> list[Check]:
    """Return what a child is, measured, beside what its folder says.

    Latency is compared as a share of the parent's, both measured in turns, so that another machine's pace is no fault.

    Memory:        parent and child, and their caches.

    Args:
        folder: Of the child.
        parent: Its parent's folder; default: where it was.
        rounds: Of each measurement.
        slack: How much worse than said still holds, for latency.
        note: Called with a sentence before each part.

    Raises:
        UsageError: No child that `planish compress` wrote, or no parent.
    """
    record = _record(folder)
    source = parent or Path(record["parent"])
    if not (source / "config.json").is_file():
        raise UsageError(f"the parent is no longer in {source}; name its folder with `--parent`.")
    scenarios = [Scenario(**each) for each in record["scenarios"]]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    checks = []
    note("memory")
    child = None
    for scenario in scenarios:
        child, peak_bytes = _served(folder, scenario)
        said = record["memory_bytes"][scenario.label]
        checks.append(
            Check(
                name=f"memory {scenario.label}",
                told=format_bytes(int(said)),
                found=format_bytes(peak_bytes),
                holds=peak_bytes <= said * 1.02,
            )
        )
    if child is None:
        raise UsageError(f"{folder} was made for no scenario; make it again.")
    dtype = child.dtype
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True).eval()
    note("latency")
    checks += _latencies(record, whole, child, scenarios, rounds, slack)
    note("quality")
    return checks + _qualities(record, whole, child, tokenizer)


def _record(folder: Path) -> Mapping[str, Any]:
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(
            f"{folder} holds no {RECORD}; name the folder of a child that `planish compress` wrote."
        ) from (error)


@torch.no_grad()
def _served(folder: Path, scenario: Scenario) -> tuple[PreTrainedModel, int]:
    """Return the child and the bytes that tensors held at most while it served."""
    child: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    ids = torch.zeros(scenario.batch, scenario.context, dtype=torch.long, device=child.device)
    call = {"use_cache": True, "logits_to_keep": 1}
    with Ledger() as ledger:
        ledger.adopt([*child.parameters(), *child.buffers()], "parameters")
        if scenario.phase == "decode":
            cache = child(input_ids=ids, **call).cache
            with ledger.phase("eval"):
                child(input_ids=ids[:, -1:], cache=cache, **call)
        else:
            with ledger.phase("eval"):
                child(input_ids=ids, **call)
        peak_bytes = ledger.peak_bytes["eval"]
    return child, peak_bytes


def _latencies(
    record: Mapping[str, Any],
    parent: PreTrainedModel,
    child: PreTrainedModel,
    scenarios: list[Scenario],
    rounds: int,
    slack: float,
) -> list[Check]:
    rival = Rival(parent, scenarios, rounds)
    found = []
    for label, seconds in rival.measure(child).items():
        share, said = seconds / rival.parent_s[label], record["seconds"][label] / record["parent_seconds"][label]
        found.append(
            Check(
                name=f"latency {label}",
                told=f"{said:.1%} of the parent, {record['seconds'][label] * 1e3:.2f} ms",
                found=f"{share:.1%}, {seconds * 1e3:.2f} ms",
                holds=share <= said * (1 + slack),
            )
        )
    return found


@torch.no_grad()
def _qualities(
    record: Mapping[str, Any], parent: PreTrainedModel, child: PreTrainedModel, tokenizer: Any
) -> list[Check]:
    found = quality(Whole(child), Judge(Whole(parent), held_out(record, tokenizer)))
    said = record["quality"]
    worse = {
        "loss": found.loss - said["loss"],
        "kl": found.kl - said["kl"],
        "agreement": said["agreement"] - found.agreement,
    }
    names = {"loss": "loss (nats)", "kl": "KL to the parent", "agreement": "top-1 agreement"}
    return [
        Check(name=names[name], told=f"{said[name]:.4f}", found=f"{getattr(found, name):.4f}", holds=more <= 0.01)
        for name, more in worse.items()
    ]
