"""The question that `planish plan --model NAME --devices 64 ...` asks, read from flags and a run file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planish.cli.options import count, size_bytes
from planish.cli.theirs import Theirs, read_theirs
from planish.decode import decode, nearest
from planish.errors import UsageError
from planish.methods import Plan
from planish.plan.frames import divisors
from planish.plan.question import Question
from planish.price.architectures import architectures, find_architecture
from planish.price.config import read_config
from planish.price.config_keys import unknown_keys
from planish.price.hardware import Hardware, find_hardware, with_memory
from planish.runfile import load_tree
from planish.sections import DataSection, MemorySection, MeshSection, ModelSection, TrainSection
from planish.shapes import ModelShape
from planish.train.stage_plan import price_of_stages

_DEFAULT_HARDWARE = "h100"
DEGREES = ("replicate", "cp", "ep", "vp", "pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question, and how it was understood.

    Attributes:
        question: What is asked.
        name: What the model was called.
        model: What a run file would say of the model.
        notes: What was assumed, a sentence each.
        config: The model's config.json.
        theirs: The run of another framework that is asked about.
    """

    question: Question
    name: str
    model: dict[str, Any]
    notes: tuple[str, ...]
    config: Mapping[str, Any]
    theirs: Theirs | None = None


def ask(options: Any, settings: list[tuple[str, Any]]) -> Asked:
    """Return the question of a run file and flags.

    Raises:
        UsageError: Anything that cannot be used, by the flag's or the setting's name.
    """
    file = options.run / "run.toml" if options.run is not None and options.run.is_dir() else options.run
    tree = load_tree(file, settings)
    _refuse_unknown(tree)
    theirs = None if options.from_ is None else read_theirs(options.from_)
    if theirs is not None:
        tree = {**tree, "model": {"dtype": theirs.dtype, **tree.get("model", {})}}
    name, config, model = _model(options.model or (theirs and theirs.model), tree.get("model", {}))
    section = decode(ModelSection, {**_without(tree.get("model", {}), "from", "gguf", "config"), "from": "."}, "model")
    memory = decode(MemorySection, tree.get("memory", {}), "memory")
    shape = read_config(config)
    context = _context(options, tree, shape, theirs)
    devices = count(options.devices, name="--devices") if options.devices else _ranks(tree)
    hardware = with_memory(find_hardware(options.hardware or _DEFAULT_HARDWARE), memory.budget)
    question = Question(
        shape=shape,
        dtype=section.dtype,
        context=context,
        rows=_rows(options, tree, context) or (theirs and theirs.rows * theirs.microbatches * devices),
        devices=devices,
        hardware=hardware,
        host=None if options.host_memory is None else size_bytes(options.host_memory, name="--host-memory"),
        disk=None if options.disk is None else size_bytes(options.disk, name="--disk"),
        fixed=_fixed_methods(tree, question_mixed=any(not isinstance(each.ffn, int) for each in shape.layers)),
        degrees=_fixed_degrees(tree, shape, devices),
        stages=price_of_stages(shape, config),
    )
    return Asked(
        question=question,
        name=name,
        model={**model, "dtype": section.dtype},
        notes=(*_notes(options, config, shape, context, memory), *(theirs.notes if theirs is not None else ())),
        config=config,
        theirs=theirs,
    )


def _refuse_unknown(tree: Mapping[str, Any]) -> None:
    known = ("model", "data", "train", "memory", "mesh", "plan", "save")
    for key in tree:
        if key not in known:
            raise UsageError(f"unknown key `{key}`; {nearest(key, known)}")


def _without(tree: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key not in keys}


def _model(asked: str | None, tree: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], dict[str, Any]]:
    """Return the model's name, its config, and what a run file would say of it."""
    text = asked or tree.get("from") or tree.get("config")
    if not isinstance(text, str):
        known = ", ".join(sorted(architectures()))
        raise UsageError(f"`--model` must name a folder, a config.json or a known architecture: {known}.")
    path = Path(text)
    if path.is_dir() and not (path / "config.json").is_file():
        raise UsageError(f"`--model` folder {path} has no config.json; name a transformers model folder.")
    if path.is_dir():
        return path.name, _read(path / "config.json"), {"from": text}
    if path.is_file():
        return path.stem, _read(path), {"config": text}
    config = find_architecture(text)
    if config is None:
        raise UsageError(
            f"`--model` {text!r} is neither a folder, nor a config.json, nor a known architecture; "
            f"{nearest(text.lower().rpartition('/')[2], architectures())}"
        )
    return text, config, {"from": text}


def _read(path: Path) -> Mapping[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a config that can be read: {error}") from error
    if not isinstance(tree, Mapping):
        raise UsageError(f"{path} is not a config that can be read: it holds no table.")
    return tree


def _context(options: Any, tree: Mapping[str, Any], shape: ModelShape, theirs: Theirs | None) -> int:
    data = tree.get("data", {})
    if options.context is not None:
        return count(options.context, name="--context")
    if "context" in data:
        return decode(DataSection, {"train": "none", "context": data["context"]}, "data").context
    if theirs is not None and theirs.context is not None:
        return theirs.context
    return min(shape.max_positions or 4096, 4096)


def _rows(options: Any, tree: Mapping[str, Any], context: int) -> int | None:
    train = decode(TrainSection, _without(tree.get("train", {}), "steps", "warmup"), "train")
    tokens, name = train.global_tokens, "train.global_tokens"
    if options.batch_tokens is not None:
        tokens, name = count(options.batch_tokens, name="--batch-tokens"), "--batch-tokens"
    if tokens is None:
        return None
    if tokens % context:
        near = max(1, round(tokens / context)) * context
        raise UsageError(f"`{name}` ({tokens:,}) must be a multiple of the context ({context:,}); try {near}.")
    return tokens // context


def _ranks(tree: Mapping[str, Any]) -> int:
    return decode(MeshSection, tree.get("mesh", {}), "mesh").size


def _fixed_methods(tree: Mapping[str, Any], *, question_mixed: bool) -> dict[str, Any]:
    """Return the methods that the user has named, by peak."""
    table = tree.get("plan", {})
    plan = decode(Plan, table, "plan")
    named = {name: getattr(plan, name) for name in table if name != "pipeline"}
    return named if question_mixed else {name: method for name, method in named.items() if name != "dispatch"}


def _fixed_degrees(tree: Mapping[str, Any], shape: ModelShape, devices: int) -> dict[str, int]:
    """Return the degrees that the user has named, each of which the devices allow."""
    table = tree.get("mesh", {})
    if not isinstance(table, Mapping):
        raise UsageError(f"`mesh` must be a table, got {table!r}.")
    found = {}
    for name in (*DEGREES, "dp"):
        if name not in table:
            continue
        value = count(str(table[name]), name=f"mesh.{name}")
        if devices % value:
            legal = ", ".join(map(str, divisors(devices)))
            raise UsageError(f"`mesh.{name}` ({value}) must divide the {devices} devices; one of {legal}.")
        found[name] = value
    pp, num_layers = found.get("pp", 1), len(shape.layers)
    if pp > num_layers:
        legal = ", ".join(str(each) for each in divisors(devices) if each <= num_layers)
        raise UsageError(f"`mesh.pp` ({pp}) must be at most the model's {num_layers} layers; one of {legal}.")
    if pp > 1 and found.get("vp", 1) > 1:
        raise UsageError(
            "`mesh.vp` does not go with `mesh.pp`, whose ranks share the vocabulary already; leave it out."
        )
    experts = max((each.ffn.num_experts for each in shape.layers if not isinstance(each.ffn, int)), default=0)
    ep = found.get("ep", 1)
    if ep > 1 and (not experts or experts % ep):
        legal = ", ".join(str(each) for each in divisors(devices) if experts and experts % each == 0) or "1"
        raise UsageError(f"`mesh.ep` ({ep}) must divide the model's {experts} experts and the devices; one of {legal}.")
    return found


def _notes(
    options: Any, config: Mapping[str, Any], shape: ModelShape, context: int, memory: MemorySection
) -> list[str]:
    notes = list(shape.assumed)
    unknown = ", ".join(f"`{key}`" for key in unknown_keys(config))
    if unknown:
        notes.append(f"fields of the config that are not known here are taken to change no size: {unknown}.")
    if shape.max_positions is not None and context > shape.max_positions:
        notes.append(f"the model has {shape.max_positions:,} positions: taken as if `model.extend_positions` were set.")
    if options.hardware is None:
        of = "its rates" if memory.budget is not None else "its memory and rates"
        notes.append(f"no `--hardware` was named: {of} are those of an {_DEFAULT_HARDWARE}.")
    recurrent = sum(layer.linear for layer in shape.layers)
    if recurrent:
        notes.append(f"{recurrent} recurrent layers are priced as attention layers; their parameters are counted.")
    return notes


def hardware_line(hardware: Hardware) -> str:
    """Return the hardware's rates as the notes of an answer say them."""
    return (
        f"{hardware.name}: {hardware.bf16_flops / 1e12:.0f} TFLOP/s bf16 of which products reach "
        f"{hardware.product_share:.0%}, links {hardware.link_rate / 1e9:.0f} GB/s in a node and "
        f"{hardware.network_rate / 1e9:.1f} between, host {hardware.host_rate / 1e9:.0f} GB/s"
    )
