"""One batch of token windows, and how rows of document pieces become one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive tokens of one document; a whole document is a piece too.

    Attributes:
        ids: Token ids, int32.
        target: The next token of the same document, `IGNORED` where nothing is counted, int32.
        target_bytes: Bytes of text that each counted target brings, int32; None where they were not asked for or
            the text is not known.
    """

    ids: np.ndarray
    target: np.ndarray
    target_bytes: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, start: int, stop: int) -> "Piece":
        """Return the tokens from `start` up to `stop`; the last one still predicts the token after the cut."""
        num_bytes = None if self.target_bytes is None else self.target_bytes[start:stop]
        return Piece(ids=self.ids[start:stop], target=self.target[start:stop], target_bytes=num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B rows of S tokens; each row holds pieces of documents, one after the other.

    One that was cut holds so many columns of the rows, and the bounds of whole rows.

    Attributes:
        input_ids: int64 [B, S].
        target: int64 [B, S]: the next token of the same document, -100 where nothing is counted.
        position_ids: int64 [B, S], from 0 in each piece.
        cu_seq_lens: Bounds of the pieces over the B * S tokens; first 0, last B * S, row edges are always bounds.
        num_valid: Targets that count.
        num_bytes: Bytes of text behind the counted targets; None in training and where the text is not known.
    """

    input_ids: Tensor
    target: Tensor
    position_ids: Tensor
    cu_seq_lens: tuple[int, ...]
    num_valid: int
    num_bytes: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of whole rows."""
        return self.cu_seq_lens[-1]

    def cut(self, columns: slice, *, first: bool) -> "Batch":
        """Return some columns of the rows; targets stay those of whole rows. Bytes of text count with the `first`."""
        input_ids, target, position_ids = (
            each[:, columns].clone(memory_format=torch.contiguous_format)  # its own storage, of these columns alone
            for each in (self.input_ids, self.target, self.position_ids)
        )
        return replace(
            self,
            input_ids=input_ids,
            target=target,
            position_ids=position_ids,
            num_valid=int((target != IGNORED).sum()),
            num_bytes=self.num_bytes if first or self.num_bytes is None else 0,
        )

    def uncounted(self) -> "Batch":
        """Return the batch with no target that counts."""
        return replace(self, target=torch.full_like(self.target, IGNORED), num_valid=0, num_bytes=0)


def assemble(rows: Sequence[Sequence[Piece]], *, width: int, pad_id: int) -> Batch:
    """Return `rows` as one batch; what a row lacks to `width` is filled with `pad_id`, a piece that counts nothing."""
    shape = (len(rows), width)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    target = np.full(shape, IGNORED, dtype=np.int64)
    position_ids = np.empty(shape, dtype=np.int64)
    bounds = [0]
    for index, row in enumerate(rows):
        stop = 0
        for piece in row:
            start, stop = stop, stop + len(piece)
            input_ids[index, start:stop] = piece.ids
            target[index, start:stop] = piece.target
            position_ids[index, start:stop] = np.arange(len(piece))
            bounds.append(index * width + stop)
        if stop < width:
            position_ids[index, stop:] = np.arange(width - stop)
            bounds.append((index + 1) * width)
    counts = [piece.target_bytes for row in rows for piece in row]
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        target=torch.from_numpy(target),
        position_ids=torch.from_numpy(position_ids),
        cu_seq_lens=tuple(bounds),
        num_valid=int(np.count_nonzero(target != IGNORED)),
        num_bytes=None if any(each is None for each in counts) else sum(int(each.sum()) for each in counts),
    )
