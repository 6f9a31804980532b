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
    """Where the vocabulary layers live, with the chain that this puts between a last forward and its backward.

    Attributes:
        chain: Transfers and passes in turn, beginning with C0. Each barrier after it keeps a microbatch more in flight.
        barriers: The transfers of the chain after C0.
        passes: The passes of the chain; in Vocab-2 also T, which follows it and may wait.
    """

    chain: tuple[Kind, ...]
    barriers: tuple[Kind, ...]
    passes: tuple[Kind, ...]

    # Embedding on the first stage, head on the last.
    LAST_STAGE = "last-stage"
    # Shared by all ranks; barriers for the maximum, the sum, the gradient.
    NAIVE = "naive", Kind.C0, Kind.S, Kind.C1, Kind.E, Kind.C2, Kind.T, Kind.C3
    # Barriers for the statistics, the gradient (Algorithm 1).
    VOCAB_1 = "vocab-1", Kind.C0, Kind.S, Kind.C1, Kind.T, Kind.C2
    # One barrier for both (Algorithm 2).
    VOCAB_2 = "vocab-2", Kind.C0, Kind.S, Kind.C1

    def __new__(cls, value: str, *chain: Kind) -> Self:
        """Return the member called `value`, with what its chain implies."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.chain = chain
        member.barriers = chain[2::2]
        member.passes = chain[1::2] if Kind.T in chain or not chain else (*chain[1::2], Kind.T)
        return member

    @property
    def shared(self) -> bool:
        """Whether embedding and head are divided over all ranks."""
        return bool(self.chain)
