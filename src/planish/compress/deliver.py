"""A child's folder as it is handed over: weights, tokenizer, and what was found of it, read back and checked."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planish.compress.fuse import fuse_child
from planish.compress.library import Library
from planish.compress.outcome import RECORD
from planish.compress.realise import write_child
from planish.compress.runs import find_fusions
from planish.compress.space import Architecture
from planish.errors import WorldFailed

_TOKENIZER = ("tokenizer", "special_tokens", "vocab", "merges", "chat_template")
_OF_THE_RUN = ("state", "manifest.json")


def write_untaught(library: Library, child: Architecture, folder: Path, parent: Path, *, fuse: bool = False) -> None:
    """Write a child as its blocks are, with the tokenizer of its parent's folder.

    Args:
        library: Of its blocks.
        child: Its layers.
        folder: Where to; what is there goes.
        parent: The parent's folder.
        fuse: Whether its networks without attention between them become one.

    Raises:
        WorldFailed: The disk refuses.
    """
    shutil.rmtree(folder, ignore_errors=True)
    write_child(library, child, folder)
    if fuse and find_fusions(child):
        apart = folder.with_name("unfused")
        shutil.rmtree(apart, ignore_errors=True)
        folder.rename(apart)
        fuse_child(apart, folder)
        shutil.rmtree(apart)
    try:
        for path in sorted(parent.iterdir()):
            if path.name.startswith(_TOKENIZER):
                shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise WorldFailed(f"the child {folder} cannot be written: {error.strerror or error}.") from error


def hand_over(made: Path, folder: Path, record: Mapping[str, Any]) -> None:
    """Have `folder` be the child in `made`, a checkpoint or already the folder itself, with what was found of it.

    Raises:
        WorldFailed: The disk refuses.
    """
    try:
        if made != folder:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(made, folder, ignore=shutil.ignore_patterns(*_OF_THE_RUN))
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise WorldFailed(f"the child {folder} cannot be written: {error.strerror or error}.") from error
