"""What was measured and judged of children, kept: a job that goes on asks nothing twice and finds the same child."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from planish.compress.costs import Scenario
from planish.compress.fuse import assemble_fused
from planish.compress.journal import Journal, key_of
from planish.compress.judge import Judge, Reader, Whole
from planish.compress.library import Library
from planish.compress.measure import Rival, machine
from planish.compress.realise import assemble
from planish.compress.runs import find_fusions
from planish.compress.settle import Quality, quality
from planish.compress.space import Architecture
from planish.compress.stack import Stack


class Known:
    """Latency and quality of a library's children, each found once.

    Memory:        nothing where all is known; else parent and child, with keys and values while one is measured, with
        the judge while one is judged.

    Args:
        library: Of blocks as they are initialised: what they learn changes no latency.
        scenarios: What is served.
        rounds: Of each measurement of latency.
        heldout: Rows that judge [R, S].
        fuse: Whether their networks without attention between them are one.
        folder: Where `measured.jsonl` and `judged.jsonl` are kept.
    """

    def __init__(
        self,
        library: Library,
        scenarios: Sequence[Scenario],
        *,
        rounds: int,
        heldout: Tensor,
        folder: Path,
        fuse: bool = False,
    ) -> None:
        self.library, self._heldout, self._fuse = library, heldout, fuse
        self._scenarios, self._rounds = tuple(scenarios), rounds
        labels = [each.label for each in self._scenarios]
        served = key_of(library.made_from, labels, rounds, machine(torch.device("cpu")))
        self._measured = Journal(folder / "measured.jsonl", served)
        self._judged = Journal(folder / "judged.jsonl", key_of(library.made_from, heldout.tolist()))

    @cached_property
    def parent_s(self) -> dict[str, float]:
        """The parent's seconds by scenario's label."""
        if "parent" not in self._measured:
            self._measured.put("parent", self._rival().parent_s)
        return self._measured["parent"]

    @cached_property
    def judge(self) -> Judge:
        """The parent's distributions over the rows that judge."""
        return Judge(Stack(self.library), self._heldout)

    def seconds(self, child: Architecture) -> dict[str, float]:
        """Return a child's seconds by scenario's label, measured beside the parent."""
        name = self.name(child)
        if name not in self._measured:
            self._measured.put(name, self._beside.measure(self._assembled(self.library, child)))
        return self._measured[name]

    def quality(self, library: Library, child: Architecture) -> Quality:
        """Return how a child of any library of the parent's does on the rows that judge."""
        if self._is_fused(child):
            name = key_of(library.made_from, self.name(child))
            return self.quality_as(name, lambda: Whole(self._assembled(library, child)))
        return self.quality_as(key_of(library.made_from, child.to_tree()), lambda: Stack(library, child))

    def _is_fused(self, child: Architecture) -> bool:
        return self._fuse and bool(find_fusions(child))

    def name(self, child: Architecture) -> str:
        """Return a hash of a child's layers, and of whether they are fused."""
        return key_of(child.to_tree(), "fused") if self._is_fused(child) else key_of(child.to_tree())

    def _assembled(self, library: Library, child: Architecture) -> PreTrainedModel:
        return assemble_fused(library, child) if self._fuse else assemble(library, child)

    def quality_as(self, name: str, open_child: Callable[[], Reader]) -> Quality:
        """Return how the child that goes by `name`, a hash of what it is made of, does on the rows that judge."""
        if name not in self._judged:
            self._judged.put(name, asdict(quality(open_child(), self.judge)))
        return Quality(**self._judged[name])

    @cached_property
    def _beside(self) -> Rival:
        return self._rival(self.parent_s)

    def _rival(self, parent_s: dict[str, float] | None = None) -> Rival:
        parent = assemble(self.library, self.library.space.parent)
        return Rival(parent, self._scenarios, self._rounds, parent_s)
