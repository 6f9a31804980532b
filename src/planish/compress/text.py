"""Text for every stage: rows of tokens that calibrate, score and judge, one part of a corpus each, and the rest."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from planish.compress.journal import key_of
from planish.data.corpus import Place
from planish.data.encode import Encoder, Tokenizer
from planish.data.sources import open_corpora
from planish.errors import UsageError, WorldFailed
from planish.train.run_folder import write_atomically


def rows_of(sources: Sequence[str], tokenizer: Tokenizer, *, context: int, count: int, skip: int = 0) -> Tensor:
    """Return rows of token ids [count, context] of `sources`, their documents one after the other.

    Args:
        sources: Files, folders or built-in corpora.
        tokenizer: The model's.
        context: Tokens of a row.
        count: Rows.
        skip: Rows that are left out before the first.

    Raises:
        UsageError: A source that cannot be used, or fewer rows than that.
    """
    stream = (token for ids in _documents(sources, tokenizer) for token in ids)
    wanted = (skip + count) * context
    ids = torch.tensor(list(islice(stream, wanted)), dtype=torch.long)
    if len(ids) < wanted:
        raise UsageError(
            f"{', '.join(sources)} holds {len(ids):,} tokens, compression was asked to read {wanted:,} of them; name "
            "more text, or ask for fewer rows."
        )
    return ids.view(-1, context)[skip:]


def write_rest(
    sources: Sequence[str], tokenizer: Tokenizer, path: Path, *, skip: int, count: int, at_least: int
) -> str:
    """Write the tokens of `sources` after the first `skip`, `count` of them or all there are, as a token file.

    Memory:        the tokens of one document.

    Args:
        sources: Files, folders or built-in corpora.
        tokenizer: The model's.
        path: The file; one that was written from the same stays.
        skip: Tokens that are left out before the first.
        count: Tokens at most.
        at_least: Tokens that there must be.

    Returns:
        A hash of what was read: files with their sizes and times, and which part of them.

    Raises:
        UsageError: A source that cannot be used, or fewer tokens than that.
        WorldFailed: The disk refuses.
    """
    [corpus] = open_corpora(sources, Encoder(tokenizer))
    files = [(str(each.path), each.size_bytes, each.path.stat().st_mtime_ns) for each in corpus.files]
    key, told = key_of(files, len(tokenizer), skip, count), path.with_name(f"{path.name}.json")
    if told.exists() and json.loads(told.read_text(encoding="utf-8"))["key"] == key:
        return key
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        told.unlink(missing_ok=True)
        written = _write_part(path, _documents(sources, tokenizer), skip, count)
        if written < at_least:
            raise UsageError(
                f"{', '.join(sources)} holds {written:,} tokens that no other stage reads, too few to learn from; name "
                "more text, or ask for fewer `--rows`."
            )
        write_atomically(told, json.dumps({"dtype": "uint32", "key": key}))
    except OSError as error:
        raise WorldFailed(f"{path} cannot be written: {error.strerror or error}.") from error
    return key


def _write_part(path: Path, documents: Iterator[np.ndarray], skip: int, count: int) -> int:
    """Write `count` ids after the first `skip`, and return how many there were."""
    written = 0
    with path.open("wb") as file:
        for ids in documents:
            part = ids[skip : skip + count - written]
            skip = max(0, skip - len(ids))
            file.write(part.astype("<u4").tobytes())
            written += len(part)
            if written == count:
                break
    return written


def _documents(sources: Sequence[str], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the token ids of each document, in the order of the files."""
    encode = Encoder(tokenizer)
    [corpus] = open_corpora(sources, encode)
    return (encode(document).ids for _, document in corpus.epoch(None, Place()))
