"""Checkpoints: Hugging Face folders that also hold, bit for bit, everything a run needs to go on."""

import base64
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from planish.comm.world import ALONE, World
from planish.decode import encode
from planish.errors import CheckpointCorrupt, UsageError
from planish.methods import Plan
from planish.train.behind import Files, at_once
from planish.train.collect import Collected, outlines
from planish.train.model_folder import config_difference, weights_of, write_model
from planish.train.run_folder import RunFolder, disk_errors
from planish.train.seal import Unsealed, checkpoints_in, damage_of, digest, recover
from planish.train.tensor_files import FarTensor, describe, difference, load_tensors, save_tensors

_PROJECTION = ("proj_rank", "granularity", "update_gap", "projection", "refresh", "seed", "weights")
_OWN = "weights/"  # in `state/`: weights as they lie in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """A checkpoint whose files are what was written.

    Attributes:
        path: A folder that `from_pretrained` opens.
        step: Optimizer steps done.
        skipped: Why newer ones were passed over, one sentence each; to be shown.
    """

    path: Path
    step: int
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `load` read beside the tensors.

    Attributes:
        step: Optimizer steps done.
        progress: What `save` was given, as JSON returns it (tuples become lists).
        notes: Differences that forbid nothing but may change bits, one sentence each; to be shown.
    """

    step: int
    progress: dict[str, Any]
    notes: tuple[str, ...]


def save(  # noqa: PLR0913 - keyword-only options of a public function
    folder: RunFolder,
    *,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    tensors: Mapping[str, Any],
    progress: Mapping[str, Any],
    plan: Plan,
    keep: int,
    world: World = ALONE,
) -> Path:
    """Return `checkpoints/step-…`, complete and durable; a kill at any moment leaves the one before usable.

    As `write`, and then `Unsealed.seal` with `keep`.

    Raises:
        WorldFailed: The disk refuses; what was begun is removed and earlier checkpoints stay.
        ValueError: `progress` is not JSON, or `tensors` has a name twice.
    """
    found = write(
        folder,
        step=step,
        model=model,
        tokenizer=tokenizer,
        tensors=tensors,
        progress=progress,
        plan=plan,
        world=world,
    )
    with disk_errors(f"saving {found.path.name}"):
        if world.leads:
            try:
                found.seal(keep)
            except BaseException:
                found.drop()
                raise
        world.barrier()
    return found.path


def write(  # noqa: PLR0913 - keyword-only options of a public function
    folder: RunFolder,
    *,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    tensors: Mapping[str, Any],
    progress: Mapping[str, Any],
    plan: Plan,
    world: World = ALONE,
    files: Files = at_once,
) -> Unsealed:
    """Return a checkpoint that nothing is missing from but its seal, once `files` are done with it.

    Files are written into a hidden folder, made durable, listed with their checksums, and only then is the folder
    given its name. The random number generators' states are written too. Weights that transformers converts on save
    (fused experts) are written a second time as they lie in memory, so that resuming depends on no conversion.

    Memory:    one tensor where it has to be copied, or the converted weights of one layer.
    Exactness: `load` restores every bit.

    Args:
        folder: Where the run goes.
        step: Optimizer steps done.
        model: As it trains; its parameters may be tied.
        tokenizer: Saved beside the model, if there is one.
        tensors: The optimizer's tensors, in mappings nested at will under string keys.
        progress: Schedule, data position and whatever else JSON can hold.
        plan: The plan of the run.
        world: All of its ranks save together, each its own shards; rank 0 writes the rest.
        files: Opens the files of tensors.

    Raises:
        WorldFailed: The disk refuses; what was begun is removed and earlier checkpoints stay.
        ValueError: `progress` is not JSON, or `tensors` has a name twice.
    """
    found = Unsealed(folder=folder, step=step)
    with disk_errors(f"saving {found.path.name}"):
        state = found.partial / "state"
        try:
            if world.leads:
                recover(folder)
                state.mkdir(parents=True)
            world.barrier()
            stored = _write_model(found.partial, model, tokenizer, world, files)
            save_tensors(state, _own(weights_of(model), stored) | _flatten(tensors), files)
            rng = world.gather(_rng_state())
            if world.leads:
                facts = {
                    "step": step,
                    "progress": progress,
                    "weights": stored,
                    "rng": rng,
                    "versions": _versions(),
                    "plan_sha256": digest(plan.to_toml()),
                    "optim": encode(plan)["optim"],
                    "tokenizer_sha256": _tokenizer_digest(tokenizer),
                }
                (state / "state.json").write_text(json.dumps(facts, allow_nan=False), encoding="utf-8")
        except BaseException:  # on any rank: one that comes late makes the folder again
            found.drop()
            raise
    return found


def latest(folder: RunFolder, *, checksums: bool = True) -> CheckpointRef | None:
    """Return `newest` of the run's own checkpoints, once what a killed save left behind is removed.

    Raises:
        CheckpointCorrupt: There are checkpoints, and none is intact.
    """
    recover(folder)
    return newest(folder.checkpoints, checksums=checksums)


def newest(checkpoints: Path, *, checksums: bool = True) -> CheckpointRef | None:
    """Return the newest checkpoint whose files are what was written, or None where the run has saved none.

    The folders alone decide: `latest`, which may be gone or empty, only tells of a checkpoint that is gone.

    Args:
        checkpoints: `checkpoints` of a run folder, which is read and not changed.
        checksums: Read every file and compare its checksum; otherwise names and sizes alone.

    Raises:
        CheckpointCorrupt: There are checkpoints, and none is intact.
    """
    found = {path.name: (step, path) for step, path in checkpoints_in(checkpoints)}
    skipped = []
    pointer = checkpoints.parent / "latest"
    named = pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.is_file() else ""
    if named and named not in found:
        skipped.append(f"checkpoint {named}, which `latest` names, is gone.")
    for step, path in sorted(found.values(), reverse=True):
        damage = damage_of(path, checksums=checksums)
        if damage is None:
            return CheckpointRef(path=path, step=step, skipped=tuple(skipped))
        skipped.append(f"checkpoint {path.name} is damaged: {damage}.")
    if skipped:
        raise CheckpointCorrupt(
            f"{' '.join(skipped)} No intact checkpoint is left in {checkpoints}; start the run anew."
        )
    return None


def load(
    ref: CheckpointRef,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    tensors: Mapping[str, Any],
    plan: Plan,
    world: World = ALONE,
) -> Restored:
    """Fill `model` and `tensors` with what was saved, restore the random number generators, return the rest.

    Everything is compared before the first byte is read, and lands in the memory that is already there.

    Memory:    the pages of one tensor.
    Exactness: every bit that `save` saw.

    Args:
        ref: From `latest`.
        model: Built as the run would; its weights are overwritten in place.
        tokenizer: The run's.
        tensors: The names, shapes and dtypes that were given to `save`, allocated.
        plan: The run's; another one is allowed, and noted.
        world: Each rank reads its shards, whichever ranks wrote them.

    Raises:
        UsageError: The checkpoint is of another model, tokenizer or optimizer.
        CheckpointCorrupt: Its files cannot be read.
    """
    try:
        facts = json.loads((ref.path / "state" / "state.json").read_text(encoding="utf-8"))
        stored, weights, optimizer = facts["weights"], weights_of(model), _flatten(tensors)
        in_state = describe(ref.path / "state")
        saved_as = describe(ref.path)
        saved_weights = {name: saved_as[file_name] for name, file_name in stored.items()}
        saved_weights |= {name.removeprefix(_OWN): each for name, each in in_state.items() if name.startswith(_OWN)}
        saved_optimizer = {name: each for name, each in in_state.items() if not name.startswith(_OWN)}
        _require_same(
            "model", ref, difference(outlines(weights, world), saved_weights) or config_difference(model, ref.path)
        )
        if facts["tokenizer_sha256"] != _tokenizer_digest(tokenizer):
            _require_same("tokenizer", ref, "its vocabulary or its rules differ")
        _require_same("optimizer", ref, _projection_difference(plan, facts.get("optim", {})))
        _require_same("optimizer", ref, difference(outlines(optimizer, world), saved_optimizer))
        alone = world.pipeline is not None
        load_tensors(ref.path, {stored[name]: each for name, each in weights.items() if name in stored}, alone=alone)
        load_tensors(ref.path / "state", _own(weights, stored) | optimizer, alone=alone)
    except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
        raise CheckpointCorrupt(f"checkpoint {ref.path} cannot be read: {error}.") from error
    if len(facts["rng"]) == world.size:
        _set_rng_state(facts["rng"][world.rank])
    return Restored(step=facts["step"], progress=facts["progress"], notes=tuple(_notes(facts, plan, world)))


def _write_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, world: World, files: Files
) -> dict[str, str]:
    """Write the model of all ranks; return, on every rank, `write_model`'s names of all weights."""
    if world.pipeline is None:
        return write_model(folder, model, tokenizer, leads=world.leads, files=files)
    groups = Collected(weights_of(model), world)
    return world.gather(write_model(folder, model, tokenizer, leads=world.leads, groups=groups, files=files))[0]


def _own(weights: Mapping[str, Tensor], stored: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the weights that transformers converts on save, under the names that `state/` has for them."""
    return {f"{_OWN}{name}": tensor for name, tensor in weights.items() if name not in stored}


def _require_same(what: str, ref: CheckpointRef, differing: str | None) -> None:
    if differing is not None:
        raise UsageError(
            f"checkpoint {ref.path} is of another {what}: {differing}; resume with the settings that wrote it, "
            "or start a new run folder."
        )


def _projection_difference(plan: Plan, saved: Mapping[str, Any]) -> str | None:
    """Return which option says that saved moments are of another projection than `plan`'s, or None where none does."""
    here = encode(plan)["optim"]
    for name in _PROJECTION:
        if here.get(name) != saved.get(name):
            return f"`plan.optim.{name}` is {saved.get(name)!r} in the checkpoint and {here.get(name)!r} here"
    return None


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor | FarTensor]:
    flat: dict[str, Tensor | FarTensor] = {}
    for key, value in tree.items():
        below = _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        if twice := flat.keys() & below.keys():
            raise ValueError(f"`tensors` has the name {min(twice)!r} twice; keys are joined by dots.")
        flat |= below
    return flat


def _rng_state() -> dict[str, Any]:
    _, keys, position, *gauss = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in cuda],
        "python": random.getstate(),
        "numpy": [keys.tolist(), position, *gauss],
    }


def _set_rng_state(state: Mapping[str, Any]) -> None:
    kind, words, gauss = state["python"]
    random.setstate((kind, tuple(words), gauss))
    np.random.set_state(("MT19937", *state["numpy"]))
    torch.set_rng_state(_decode(state["torch"]))
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([_decode(each) for each in state["cuda"]])


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("planish", "torch", "transformers")}


def _notes(facts: Mapping[str, Any], plan: Plan, world: World) -> Iterator[str]:
    if len(facts["rng"]) != world.size:
        yield f"written by {len(facts['rng'])} rank(s), read by {world.size}: random numbers (dropout) begin anew."
    if facts["plan_sha256"] != digest(plan.to_toml()):
        yield "the plan is not the one that wrote the checkpoint, so sums may be taken in another order."
    for name, now in _versions().items():
        if facts["versions"][name] != now:
            yield f"{name} is {now} and was {facts['versions'][name]}, so bits may differ."


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    if tokenizer is None:
        return None
    if not tokenizer.is_fast:
        return digest(json.dumps(tokenizer.get_vocab(), sort_keys=True))
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    del rules["padding"], rules["truncation"]  # the last call's, not the tokenizer's
    return digest(json.dumps(rules, sort_keys=True))
