"""Actions: the entries of a rank's list, printed and parsed as `2F0`, and the kinds that the head's place asks for."""

import re
from enum import StrEnum
from typing import NamedTuple, Self


class Kind(StrEnum):
    """What an action does; what torch.distributed.pipelining also has is written as there."""

    F = "F"  # forward of a stage
    B = "B"  # backward of a stage
    I = "I"  # the half of it that the stage before waits for
    W = "W"  # the half that nobody waits for
    S = "S"  # logits of the own vocabulary shard and their local statistics
    E = "E"  # exponentials against the global maximum (naive grouping)
    T = "T"  # gradients of the own vocabulary shard
    IF = "IF"  # embedding rows of the own vocabulary shard
    IB = "IB"  # their gradient
    SEND_F = "SEND_F"  # hidden state to the next stage
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"  # its gradient to the stage before
    RECV_B = "RECV_B"
    C0 = "C0"  # last hidden state to every shard
    C1 = "C1"  # first barrier
    C2 = "C2"  # second barrier
    C3 = "C3"  # third barrier
    CIF = "CIF"  # embedding rows to the first stage
    CIB = "CIB"  # their gradient to every shard


PASSES = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.S, Kind.E, Kind.T, Kind.IF, Kind.IB})
STAGE_PASSES = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
COLLECTIVES = frozenset({Kind.C0, Kind.C1, Kind.C2, Kind.C3, Kind.CIF, Kind.CIB})

_WORD = re.compile(rf"(\d+)({'|'.join(sorted(Kind, key=len, reverse=True))})(\d+)")


class Action(NamedTuple):
    """One entry of a rank's list: `2F0` is stage 2, forward, microbatch 0.

    Vocabulary passes and collectives belong to a rank rather than to a stage; they carry the index of the rank, which
    is also the index of its first stage.

    Example:
        >>> str(Action(3, Kind.SEND_F, 1)), Action.parse("0C112") == Action(0, Kind.C1, 12)
        ('3SEND_F1', True)
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, word: str) -> Self:
        """Return the action that `word` names.

        Raises:
            ValueError: `word` is not `[stage][kind][microbatch]`.
        """
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not an action; write [stage][kind][microbatch], such as 2F0 or 3SEND_B1.")
        stage, kind, microbatch = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch))


class Head(StrEnum):
    """Where the vocabulary layers live.

    Barriers stand between the last forward of a microbatch and its first backward; each keeps one more in flight.
    """

    LAST_STAGE = "last-stage"  # embedding on the first stage, head on the last; no vocabulary passes
    NAIVE = "naive"  # shared by all ranks; barriers for maximum, sum, gradient
    VOCAB_1 = "vocab-1"  # barriers for statistics, gradient (Algorithm 1)
    VOCAB_2 = "vocab-2"  # one barrier for both (Algorithm 2)

    @property
    def shared(self) -> bool:
        """Whether embedding and head are divided over all ranks."""
        return self is not Head.LAST_STAGE

    @property
    def chain(self) -> tuple[Kind, ...]:
        """What runs between the last forward and the first backward of a microbatch, in order."""
        match self:
            case Head.LAST_STAGE:
                return ()
            case Head.NAIVE:
                return (Kind.C0, Kind.S, Kind.C1, Kind.E, Kind.C2, Kind.T, Kind.C3)
            case Head.VOCAB_1:
                return (Kind.C0, Kind.S, Kind.C1, Kind.T, Kind.C2)
            case Head.VOCAB_2:
                return (Kind.C0, Kind.S, Kind.C1)

    @property
    def passes(self) -> tuple[Kind, ...]:
        """The passes of the head, in order; Vocab-2's T follows the chain and may wait."""
        passes = tuple(kind for kind in self.chain if kind in PASSES)
        return (*passes, Kind.T) if self is Head.VOCAB_2 else passes

    @property
    def barriers(self) -> tuple[Kind, ...]:
        """The barriers of the chain, in order."""
        return tuple(kind for kind in self.chain[1:] if kind in COLLECTIVES)
