"""Text for calibration, scores and judgement: rows of tokens, one part of a corpus for each, none in two."""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from planish.data.corpus import Place
from planish.data.encode import Encoder, Tokenizer
from planish.data.sources import open_corpora
from planish.errors import UsageError


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
    encode = Encoder(tokenizer)
    [corpus] = open_corpora(sources, encode)
    stream = (
        token for _, document in corpus.epoch(None, Place()) for piece in [encode(document)] for token in piece.ids
    )
    wanted = (skip + count) * context
    ids = torch.tensor(list(islice(stream, wanted)), dtype=torch.long)
    if len(ids) < wanted:
        raise UsageError(
            f"{', '.join(sources)} holds {len(ids):,} tokens, compression was asked to read {wanted:,} of them; name "
            "more text, or ask for fewer rows."
        )
    return ids.view(-1, context)[skip:]
