"""Runs of other frameworks: the dozen keys of their files that decide about memory, read as a plan of ours.

axolotl and LLaMA-Factory keep YAML, transformers' `TrainingArguments` JSON. What is not read changes no bytes that are
told here; what cannot be said of a plan (quantised weights, adapters) is noted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planish.errors import UsageError
from planish.methods import AdamW, Blocked, Checkpoint, Offload, Pipelined, Plain, Plan, StreamAdamW
from planish.plan.question import Candidate, Question
from planish.shapes import MeshShape

_ALL = 2**60
_LENGTH = ("sequence_len", "cutoff_len", "max_length", "max_seq_length", "model_max_length")
_ROWS = ("micro_batch_size", "per_device_train_batch_size")
_MODEL = ("base_model", "model_name_or_path")
_FUSED = ("cut_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy", "enable_liger_kernel")
_SHARDS = ("fsdp", "fsdp_config", "fsdp_version", "deepspeed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Theirs:
    """What a file of another framework asks for.

    Attributes:
        framework: Whose file it is taken to be.
        model: The model's name or folder, where it is said.
        context: Tokens of a row, where they are said.
        rows: Rows of a microbatch.
        microbatches: Of a step.
        dtype: As in our run files.
        plan: The methods that come nearest.
        sharded: Whether ranks share the weights.
        notes: What could not be said of a plan.
    """

    framework: str
    model: str | None
    context: int | None
    rows: int
    microbatches: int
    dtype: str
    plan: Plan
    sharded: bool
    notes: tuple[str, ...]

    def as_it_stands(self, question: Question) -> Candidate:
        """Return that run on the question's devices, priced."""
        devices = question.devices
        mesh = MeshShape(dp=devices) if self.sharded else MeshShape(replicate=devices)
        plan = replace(self.plan, dispatch=Pipelined()) if question.mixed else self.plan
        return Candidate(replace(question, dtype=self.dtype), mesh, self.rows, self.microbatches, plan)


def read_theirs(path: Path) -> Theirs:
    """Return what the file at `path` asks for.

    Raises:
        UsageError: Not there, neither YAML nor JSON, or no training run.
    """
    tree = _load(path)
    framework = _framework(tree)
    if framework is None:
        raise UsageError(
            f"`--from` {path} is no run of axolotl, LLaMA-Factory or transformers that is known: it has none of "
            "`micro_batch_size`, `cutoff_len`, `per_device_train_batch_size`."
        )
    return Theirs(
        framework=framework,
        model=next((str(tree[key]) for key in _MODEL if tree.get(key)), None),
        context=_whole(tree, _LENGTH),
        rows=_whole(tree, _ROWS) or (8 if framework == "transformers" else 1),
        microbatches=_whole(tree, ("gradient_accumulation_steps",)) or 1,
        dtype=_dtype(tree, framework),
        plan=_plan(tree, framework),
        sharded=any(tree.get(key) for key in _SHARDS),
        notes=tuple(_notes(tree)),
    )


def _load(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"`--from` {path} cannot be read: {error}") from error
    import yaml

    try:
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except ValueError as error:
        raise UsageError(f"`--from` {path} is not JSON: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"`--from` {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, Mapping):
        raise UsageError(f"`--from` {path} holds no table of settings.")
    return tree


def _framework(tree: Mapping[str, Any]) -> str | None:
    if "base_model" in tree or "micro_batch_size" in tree:
        return "axolotl"
    if "cutoff_len" in tree or "finetuning_type" in tree or "model_name_or_path" in tree:
        return "LLaMA-Factory"
    return "transformers" if "per_device_train_batch_size" in tree else None


def _whole(tree: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        value = tree.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"`{key}` of the file must be a positive whole number, got {value!r}.")
        return value
    return None


def _dtype(tree: Mapping[str, Any], framework: str) -> str:
    """Return the dtype: axolotl and `pure_bf16` keep bf16 weights without masters, mixed precision fp32 ones."""
    if tree.get("pure_bf16") or (framework == "axolotl" and tree.get("bf16")):
        return "bf16-pure"
    return "bf16" if tree.get("bf16") or tree.get("fp16") else "fp32"


def _plan(tree: Mapping[str, Any], framework: str) -> Plan:
    checkpointed = tree.get("gradient_checkpointing", framework == "LLaMA-Factory")
    checkpointed = bool(checkpointed) and not tree.get("disable_gradient_checkpointing")
    offloaded = tree.get("activation_offloading") or (
        isinstance(kwargs := tree.get("gradient_checkpointing_kwargs"), Mapping) and kwargs.get("offload")
    )
    deepspeed = str(tree.get("deepspeed") or "")
    fused = any(tree.get(key) for key in _FUSED)
    return Plan(
        vocab=Blocked() if fused else Plain(),
        dispatch=Plain(),
        boundary=Offload(host=_ALL) if offloaded else Checkpoint() if checkpointed else Plain(),
        optim=StreamAdamW(host=_ALL) if "offload" in deepspeed else AdamW(),
    )


def _notes(tree: Mapping[str, Any]) -> list[str]:
    notes = []
    if tree.get("adapter") or str(tree.get("finetuning_type", "full")) not in ("full", "freeze"):
        notes.append("its adapter is not priced: all weights are taken to be trained.")
    if tree.get("load_in_4bit") or tree.get("load_in_8bit") or tree.get("quantization_bit"):
        notes.append("its quantised weights are not priced: they are taken to be as wide as its dtype.")
    optim = str(tree.get("optim") or tree.get("optimizer") or "adamw")
    if "adamw" not in optim or "8bit" in optim:
        notes.append(f"its optimizer {optim!r} is priced as AdamW.")
    if not any(tree.get(key) for key in ("sample_packing", "packing", "neat_packing", "group_by_length")):
        notes.append("its rows are taken to be full.")
    return notes
