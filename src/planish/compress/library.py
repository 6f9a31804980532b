"""Blocks on disk: a safetensors file for each layer, kind and option, checked by its hash when it is read."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from planish.compress.blocks import Kind
from planish.compress.space import Choice, Option, Space
from planish.decode import decode, encode
from planish.errors import CheckpointCorrupt, UsageError, WorldFailed
from planish.train.tensor_files import write_safetensors

ENDS = "ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInfo:
    """What is known of one block.

    Attributes:
        sha256: Of its file.
        size_bytes: Of its tensors.
        made: How its weights were found, such as "parent", "mean heads, refit".
        error: Its sub-block's squared error on held-out tokens over the parent's squared output; 0 is the parent.
        plain_error: The same of the best published initialisation, without a re-fit.
    """

    sha256: str
    size_bytes: int
    made: str
    error: float
    plain_error: float


def block_name(layer: int, kind: Kind, option: Option) -> str:
    """Return the name of a block, its file's stem."""
    return f"layer-{layer:03d}-{kind}-{option.label}"


def pair_name(layer: int, choice: Choice) -> str:
    """Return the name of a block that is attention and network of a layer in one, trained together."""
    return f"layer-{layer:03d}-pair-{choice.label}"


class Library:
    """A folder of blocks.

    Args:
        folder: With a library.json.

    Raises:
        UsageError: None there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            head = json.loads((folder / "library.json").read_text(encoding="utf-8"))
            self.space = decode(Space, head["space"], "space")
            self.made_from: str = head["made_from"]
        except (OSError, json.JSONDecodeError, KeyError) as error:
            raise UsageError(
                f"{folder} holds no library of blocks ({error}); `planish compress` writes one."
            ) from error
        self.config: Any = AutoConfig.from_pretrained(folder / "parent", local_files_only=True)
        self._blocks = _read_index(folder / "blocks.jsonl")
        self._checked: set[str] = set()
        self._shapes: dict[str, dict[str, Tensor]] = {}

    @classmethod
    def create(
        cls, folder: Path, *, config: Any, space: Space, made_from: str, generation: GenerationConfig | None = None
    ) -> Self:
        """Return the library in `folder`, begun anew or gone on with.

        Args:
            folder: Its place.
            config: The parent's transformers config.
            space: Which blocks it will hold.
            made_from: A hash of all that its blocks depend on: weights, text, settings.
            generation: How the parent generates, for its children.

        Raises:
            UsageError: A library there that was made from something else.
            WorldFailed: The disk refuses.
        """
        if (folder / "library.json").exists():
            library = cls(folder)
            if library.made_from != made_from or library.space != space:
                raise UsageError(
                    f"the library in {folder} was made from another model, text or settings; name another folder."
                )
            return library
        try:
            folder.mkdir(parents=True, exist_ok=True)
            config.save_pretrained(folder / "parent")
            if generation is not None:
                generation.save_pretrained(folder / "parent")
            _write_text(folder / "library.json", json.dumps({"made_from": made_from, "space": encode(space)}))
        except OSError as error:
            raise WorldFailed(f"the library {folder} cannot be written: {error.strerror or error}.") from error
        return cls(folder)

    def __contains__(self, name: str) -> bool:
        return name in self._blocks

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def info(self, name: str) -> BlockInfo:
        """Return what is known of block `name`.

        Raises:
            UsageError: A block that was not made.
        """
        if name not in self._blocks:
            raise UsageError(f"the library {self.folder} has no block {name}; let `planish compress` finish it.")
        return self._blocks[name]

    def write(self, name: str, tensors: Mapping[str, Tensor], *, made: str, error: float, plain_error: float) -> None:
        """Write a block; it is there when this returns, or not at all.

        Memory:        a tensor, where it is not contiguous.

        Raises:
            WorldFailed: The disk refuses.
        """
        path = self._path(name)
        scratch = path.with_suffix(".part")
        try:
            write_safetensors(scratch, tensors, {"format": "pt"})
            info = BlockInfo(
                sha256=_digest(scratch),
                size_bytes=sum(each.nbytes for each in tensors.values()),
                made=made,
                error=error,
                plain_error=plain_error,
            )
            scratch.replace(path)
            _append(self.folder / "blocks.jsonl", json.dumps({"name": name, **encode(info)}))
        except OSError as error_:
            raise WorldFailed(f"block {path} cannot be written: {error_.strerror or error_}.") from error_
        self._blocks[name] = info
        self._checked.add(name)

    def take(self, other: "Library", name: str) -> None:
        """Have block `name` of another library in this one too; its file is shared where the disk can.

        Raises:
            UsageError: A block that the other has not.
            WorldFailed: The disk refuses.
        """
        info, path = other.info(name), self._path(name)
        try:
            path.unlink(missing_ok=True)
            try:
                path.hardlink_to(other._path(name))
            except OSError:
                shutil.copyfile(other._path(name), path)
            _append(self.folder / "blocks.jsonl", json.dumps({"name": name, **encode(info)}))
        except OSError as error:
            raise WorldFailed(f"block {path} cannot be written: {error.strerror or error}.") from error
        self._blocks[name] = info

    def read(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of block `name`, its file checked the first time.

        Memory:        the block.

        Raises:
            UsageError: A block that was not made.
            CheckpointCorrupt: A file that is not what was written.
        """
        self._check(name)
        return load_file(self._path(name))

    def _check(self, name: str) -> None:
        info, path = self.info(name), self._path(name)
        if name in self._checked:
            return
        try:
            intact = _digest(path) == info.sha256
        except OSError as error:
            raise CheckpointCorrupt(f"block {path} cannot be read: {error.strerror or error}.") from error
        if not intact:
            raise CheckpointCorrupt(
                f"block {path} is not what was written (its sha256 differs); delete that file, and `planish compress` "
                "makes it again."
            )
        self._checked.add(name)

    def layer(self, index: int, choice: Choice) -> dict[str, Tensor]:
        """Return the tensors of layer `index` made as `choice`, named as in the layer."""
        return {key: each for name in self.blocks(index, choice) for key, each in self.read(name).items()}

    def blocks(self, index: int, choice: Choice) -> tuple[str, ...]:
        """Return the names of the blocks of layer `index` made as `choice`: a pair where there is one, else two."""
        pair = pair_name(index, choice)
        if pair in self:
            return (pair,)
        return block_name(index, "attention", choice.attention), block_name(index, "ffn", choice.ffn)

    def pairs(self) -> dict[int, list[Choice]]:
        """Return, by layer, the choices whose attention and network were trained together."""
        found = {
            index: [choice for choice in layer.choices if pair_name(index, choice) in self]
            for index, layer in enumerate(self.space.layers)
        }
        return {index: choices for index, choices in found.items() if choices}

    def error(self, index: int, kind: Kind, option: Option) -> float:
        """Return a block's relative squared error on held-out tokens."""
        return self.info(block_name(index, kind, option)).error

    def shapes(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of block `name` without their bytes."""
        if name not in self._shapes:
            with safe_open(self._path(name), framework="pt") as file:
                self._shapes[name] = {each: stand_in(file.get_slice(each)) for each in file.keys()}  # noqa: SIM118
        return self._shapes[name]

    def read_tensor(self, name: str, tensor: str) -> Tensor:
        """Return one tensor of block `name`, its file checked the first time.

        Memory:        the tensor.

        Raises:
            CheckpointCorrupt: A file that is not what was written.
        """
        self._check(name)
        with safe_open(self._path(name), framework="pt") as file:
            return file.get_tensor(tensor)

    def generation_config(self) -> GenerationConfig | None:
        """Return how the parent generates, where its folder says."""
        folder = self.folder / "parent"
        if not (folder / "generation_config.json").exists():
            return None
        return GenerationConfig.from_pretrained(folder, local_files_only=True)

    @property
    def dtype(self) -> torch.dtype:
        """Of the blocks."""
        return self.config.dtype or torch.float32

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _read_index(path: Path) -> dict[str, BlockInfo]:
    """Return the blocks that are listed; a last line that was cut off is of a block that is not there."""
    found: dict[str, BlockInfo] = {}
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    for line in lines:
        try:
            tree = json.loads(line)
        except json.JSONDecodeError:
            continue
        name = tree.pop("name")
        if (path.parent / f"{name}.safetensors").exists():
            found[name] = decode(BlockInfo, tree, f"blocks.jsonl: {name}")
    return found


def _append(path: Path, line: str) -> None:
    """Add a line, durably; one that was cut off before it stays a line of its own."""
    whole = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("" if whole else "\n") + line + "\n")
        file.flush()
        os.fsync(file.fileno())


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def stand_in(part: Any) -> Tensor:
    """Return a tensor without bytes that is shaped as a part of a safetensors file."""
    return torch.empty(part.get_shape(), dtype=_DTYPES[part.get_dtype()], device="meta")


def _write_text(path: Path, text: str) -> None:
    scratch = path.with_suffix(".part")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
