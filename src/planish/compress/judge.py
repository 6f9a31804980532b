"""What the parent says of each token, kept as D + 4 numbers a token, and how far a child's hidden states are from it.

With one head W for both, y = s W h: KL(p || q) = lse(y_q) - h_q . g + (h_p . g - lse(y_p)) with g = dlse(y_p)/dh_p, the
mean of the head's rows under p. So a child costs one product with the head, and neither's logits are formed. A child
that was trained as a whole has a head of its own: then both heads are multiplied, tile by tile.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from planish.errors import UsageError
from planish.peaks.vocab.kl import linear_kl
from planish.peaks.vocab.losses import linear_logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Of each counted token [R, C], in float64.

    Attributes:
        kl: KL(parent || child) in nats.
        nll: Minus the log-probability of the next token.
        cosine: Of the hidden states before the head, parent's and child's.
        same: Whether both find the same token most likely.
    """

    kl: Tensor
    nll: Tensor
    cosine: Tensor
    same: Tensor


class Reader(Protocol):
    """A model that reads rows; a `Stack` is one.

    Attributes:
        config: Its transformers config.
        head: The vocabulary projection [V, D].
    """

    @property
    def config(self) -> Any:
        """Its transformers config."""

    @property
    def head(self) -> Tensor:
        """The vocabulary projection [V, D]."""

    def read(self, ids: Tensor) -> Tensor:
        """Return what the head sees [B, S, D] of token ids [B, S]."""


class Whole:
    """A transformers model as a reader.

    Args:
        model: A causal LM.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self.config: Any = model.config
        self.head: Tensor = self._model.get_output_embeddings().weight

    @torch.no_grad()
    def read(self, ids: Tensor) -> Tensor:
        """Return what the head sees [B, S, D] of token ids [B, S]."""
        return self._model.get_decoder()(input_ids=ids.to(self._model.device), use_cache=False).last_hidden_state


class Judge:
    """The parent's distributions over rows of text.

    Memory:        the parent's head, D + 4 numbers for each counted token, 60 MiB of head tiles.

    Args:
        parent: Reads the rows.
        rows: Token ids [R, S].
        every: Counts the last of each `every` tokens that have a next one; the layers run on all.
        batch_rows: Rows that run at once.
    """

    def __init__(self, parent: Reader, rows: Tensor, *, every: int = 1, batch_rows: int = 4) -> None:
        if rows.shape[1] <= every:
            raise UsageError(f"`every` ({every}) must be below the {rows.shape[1]} tokens of a row.")
        self.rows = rows
        self._counted = torch.arange(every - 1, rows.shape[1] - 1, every)
        self._scale = _logit_scale(parent.config)
        self._head, self._known_head = parent.head, parent.head
        self._target = rows[:, self._counted + 1]
        found = [
            self._teach(parent, start, rows[start : start + batch_rows]) for start in range(0, len(rows), batch_rows)
        ]
        self._hidden, self._mean, self._base, self._best, self.nll = (
            torch.cat([each[part] for each in found]) for part in range(5)
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        return self._target.numel()

    @property
    def counted_per_row(self) -> int:
        """Tokens of a row that count."""
        return len(self._counted)

    def _teach(self, parent: Reader, start: int, ids: Tensor) -> tuple[Tensor, ...]:
        hidden = self._pick(parent.read(ids)).detach().requires_grad_(requires_grad=True)
        target = self._target[start : start + len(ids)].to(hidden.device)
        head = _wide(parent.head).detach()
        with torch.enable_grad():
            said = linear_logprob(
                hidden, head, target, logit_scale=self._scale, want=("nll", "lse", "argmax"), logits_dtype="float32"
            )
            [mean] = torch.autograd.grad(said.lse.sum(), hidden)
        base = (hidden.double() * mean.double()).sum(-1) - said.lse.double()
        parts = (hidden, mean, base, said.argmax, said.nll.double())
        return tuple(part.detach().cpu() for part in parts)

    def judge(self, final: Tensor, head: Tensor, start: int = 0) -> Judgement:
        """Return how a child's text differs from the parent's.

        Args:
            final: What its head sees [B, S, D] of rows `start` to start + B.
            head: Its weight [V, D].
            start: The first row.
        """
        hidden = self._pick(final)
        here = slice(start, start + len(hidden))
        target = self._target[here].to(hidden.device)
        with torch.no_grad():
            said = linear_logprob(
                hidden,
                _wide(head),
                target,
                logit_scale=self._scale,
                want=("nll", "lse", "argmax"),
                logits_dtype="float32",
            )
        parent = self._hidden[here].to(hidden.device)
        if self._is_parents(head):
            mean = self._mean[here].to(hidden.device)
            kl = said.lse.double() - (hidden.double() * mean.double()).sum(-1) + self._base[here].to(hidden.device)
        else:
            kl = self._between(hidden, head, parent)
        return Judgement(
            kl=kl.clamp(min=0).cpu(),
            nll=said.nll.double().cpu(),
            cosine=cosine_similarity(hidden.double(), parent.double(), dim=-1).cpu(),
            same=(said.argmax.cpu() == self._best[here]),
        )

    def _is_parents(self, head: Tensor) -> bool:
        if head is not self._known_head and torch.equal(head.to(self._head), self._head):
            self._known_head = head
        return head is self._known_head

    @torch.no_grad()
    def _between(self, hidden: Tensor, head: Tensor, parent: Tensor) -> Tensor:
        """Return the divergence of tokens whose child has another head than the parent."""
        scales = {"logit_scale": self._scale, "teacher_logit_scale": self._scale}
        heads = _wide(head), _wide(self._head.to(head.device))
        return linear_kl(
            hidden, heads[0], parent, heads[1], reduction="none", logits_dtype="float32", **scales
        ).double()

    def _pick(self, hidden: Tensor) -> Tensor:
        return _wide(hidden[:, self._counted.to(hidden.device)])


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _logit_scale(config: object) -> float:
    if getattr(config, "final_logit_softcapping", None) is not None:
        raise UsageError(
            "`model.from` bounds its logits (`final_logit_softcapping`), which compression cannot score yet."
        )
    scale = getattr(config, "logit_scale", None) or 1.0
    return float(scale / (getattr(config, "logits_scaling", None) or 1.0))
