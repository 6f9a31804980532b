"""A child's folder measured again: latency, memory and quality beside what was said of it when it was made."""

import json
from collections.abc import Callable, Mapping, Sequence
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
from planish.errors import UsageError, VerificationFailed
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
    note("memory")
    child, held = opened(folder, scenarios, parameters=record["parameters"])
    checks = [
        Check(
            name=f"memory {label}",
            told=format_bytes(int(said)),
            found=format_bytes(int(held[label])),
            holds=held[label] <= said * 1.02,
        )
        for label, said in record["memory_bytes"].items()
    ]
    dtype = child.dtype
    whole = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True).eval()
    note("latency")
    checks += _latencies(record, whole, child, scenarios, rounds, slack)
    note("quality")
    return checks + _qualities(record, whole, child, tokenizer)


def opened(folder: Path, scenarios: Sequence[Scenario], *, parameters: int) -> tuple[PreTrainedModel, dict[str, float]]:
    """Return a child as transformers opens it, and the bytes that tensors hold at most while it serves.

    Args:
        folder: Of the child.
        scenarios: What is served.
        parameters: Numbers that it must have.

    Returns:
        The model, and the bytes by scenario's label.

    Raises:
        VerificationFailed: It is of another size.
    """
    child: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    held = sum(each.numel() for each in child.parameters())
    if held != parameters:
        raise VerificationFailed(f"{folder} opens with {held:,} parameters and not with {parameters:,}; make it again.")
    return child, {each.label: float(served_bytes(child, each)) for each in scenarios}


def _record(folder: Path) -> Mapping[str, Any]:
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(
            f"{folder} holds no {RECORD}; name the folder of a child that `planish compress` wrote."
        ) from (error)


@torch.no_grad()
def served_bytes(child: Any, scenario: Scenario) -> int:
    """Return the bytes that tensors hold at most while `child` serves; decoding, once a token has been decoded.

    A first one finds windows' keys and values as parts of the whole prompt's.
    """
    ids = torch.zeros(scenario.batch, scenario.context, dtype=torch.long, device=child.device)
    call = {"use_cache": True, "logits_to_keep": 1}
    with Ledger() as ledger:
        ledger.adopt([*child.parameters(), *child.buffers()], "parameters")
        if scenario.phase == "decode":
            cache = child(input_ids=ids[:, :-1], **call).cache
            child(input_ids=ids[:, -1:], cache=cache, **call)
            with ledger.phase("eval"):
                child(input_ids=ids[:, -1:], cache=cache, **call)
        else:
            with ledger.phase("eval"):
                child(input_ids=ids, **call)
        return ledger.peak_bytes["eval"]


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
