"""The ledger: an exact count of the bytes that tensors hold, by phase, category and owner, held to a budget."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from planish.errors import BudgetExceeded
from planish.memory.book import Book, Category, Phase, Record
from planish.memory.owners import Owner, OwnerTracker
from planish.memory.report import (
    Held,
    PhasePeak,
    StepMemory,
    format_table,
    in_phase_order,
    largest_holders,
    sum_by_category,
)
from planish.memory.timeline import Point, Timeline
from planish.units import format_bytes

_DEFAULT_CATEGORY: dict[Phase, Category] = {
    "init": "other",
    "forward": "layer working set",
    "head": "head tiles",
    "backward": "layer working set",
    "optimizer": "staging",
    "eval": "layer working set",
    "save": "staging",
    "resume": "staging",
}
_LIFT_FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_SET = tuple(getattr(torch.ops.aten.set_, name) for name in torch.ops.aten.set_.overloads())


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """The moment the bytes alive went over the budget.

    Attributes:
        sentence: Phase, tensor, bytes alive and budget, in one sentence.
        table: Bytes alive at that moment by category and owner, as text.
    """

    sentence: str
    table: str


class Ledger(TorchDispatchMode):
    """Counts every storage that a tensor operation makes inside it, from birth to death.

    Each storage counts once, with the bytes it has at the moment: views cost nothing, an operation in place makes
    nothing, `resize_` is followed. Tensors made before count once they are adopted. Distributed tensors count as
    their local shards. Under `FakeTensorMode` (entered first) the run's fake tensors count, and give the same numbers
    as a real run.

    Only tensors on `device_type` count, real ones on "cpu" alone: on a CUDA device the allocator's own statistics are
    exact and free, see `ProcessMeter`. There the ledger is not entered; its phases, categories and steps may still be
    named, and count nothing.

    Memory:    no tensor is kept alive; about 0.5 KiB for each storage alive or alive at a phase's peak.
    Exactness: equal to the bytes of all live storages after every operation; what an operation allocates and frees
        inside itself is not seen.

    Args:
        budget_bytes: Bytes that may be alive at any moment; None means no limit.
        on_exceed: "strict" raises `BudgetExceeded` from the operation that goes over, "warn" fills `first_excess`.
        device_type: The device whose tensors count; "cuda" for fake tensors only.

    Example:
        >>> with Ledger() as ledger, ledger.phase("forward"):
        ...     x = torch.zeros(1024)
        ...     y = x.view(32, 32) + 1
        >>> ledger.live_bytes
        8192
    """

    def __init__(
        self,
        budget_bytes: int | None = None,
        on_exceed: Literal["strict", "warn"] = "strict",
        device_type: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        super().__init__()
        self.budget_bytes = budget_bytes
        self.first_excess: Excess | None = None
        self.run_peak_bytes: dict[Phase, int] = {}
        self._on_exceed = on_exceed
        self._device_type = device_type
        self._fake_mode: Any = None
        self._book = Book()
        self._timeline = Timeline()
        self._owners = OwnerTracker()
        self._phase: Phase = "init"
        self._depth = 0
        self._category: Category | None = None
        self._step: int | None = None

    @property
    def live_bytes(self) -> int:
        """Bytes alive now."""
        return self._book.live_bytes

    @property
    def live_by_category(self) -> dict[Category, int]:
        """Bytes alive now by category; they add up to `live_bytes`."""
        return dict(self._book.by_category)

    @property
    def current_phase(self) -> Phase:
        """The phase at work."""
        return self._phase

    @property
    def peak_bytes(self) -> dict[Phase, int]:
        """The peak of each phase since the step began."""
        return {phase: self._book.peaks[phase].live_bytes for phase in in_phase_order(self._book.peaks)}

    @property
    def timeline(self) -> tuple[Point, ...]:
        """(seconds since the step began, live bytes, phase), at most 2,000 points, the largest always among them."""
        return self._timeline.points()

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count what happens inside as phase `name`."""
        before, self._phase = self._phase, name
        self._depth += 1
        self._mark()
        try:
            yield
        finally:
            self._mark()
            self._phase = before
            self._depth -= 1
            if self._depth:
                self._mark()

    @contextlib.contextmanager
    def category(self, name: Category) -> Iterator[None]:
        """Label what is born inside `name`, whatever the phase and the module."""
        before, self._category = self._category, name
        try:
            yield
        finally:
            self._category = before

    def adopt(self, tensors: Tensor | Iterable[Tensor], category: Category, *, owner: str | None = None) -> None:
        """Label the storages of `tensors`, and take in those that were made before or elsewhere.

        The label holds for the storage's whole life, the peaks of the current step included.

        Args:
            tensors: One or many.
            category: What their bytes are for.
            owner: Whose they are; None keeps the owner they were born to.

        Raises:
            BudgetExceeded: Those taken in go over the budget.
        """
        for tensor in _plain_tensors(tensors):
            if not self._counts(tensor):
                continue
            storage = tensor.untyped_storage()
            entry = self._book.entries.get(storage._cdata)
            if entry is not None:
                self._book.relabel(entry.record, category, owner)
            else:
                self._grown(self._book.add(storage, tensor, category, owner or ""))

    @contextlib.contextmanager
    def watch(self, model: nn.Module, head: nn.Module | None = None) -> Iterator[None]:
        """Name the owners of what `model` makes, and adopt its parameters, buffers and gradients, while inside.

        Args:
            model: Its modules' paths become the owners of births in forward, recomputation and backward.
            head: The module that makes logits; its births and the loss's are "head tiles".
        """
        for name, parameter in model.named_parameters():
            self.adopt(parameter, "parameters", owner=name)
        for name, buffer in model.named_buffers():
            self.adopt(buffer, "other", owner=name)
        handles = self._owners.attach(model, head)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(_AdoptGradient(self, name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def start_step(self, step: int) -> None:
        """Begin to record `step`: peaks and timeline start afresh."""
        self._step = step
        self._book.forget_peaks()
        self._timeline.clear()
        if self._depth:
            self._mark()

    def end_step(self) -> StepMemory:
        """Return what was recorded since the step began (or since the start, before the first step)."""
        phases = {phase: self._phase_peak(phase) for phase in in_phase_order(self._book.peaks)}
        return StepMemory(step=self._step, phases=phases, timeline=self.timeline)

    def owners(self) -> tuple[Held, ...]:
        """Return the largest holders of the bytes alive now."""
        return largest_holders(self._book.alive())

    def table(self) -> str:
        """Return the bytes alive now by category and owner, as text."""
        return format_table(sum_by_category(self._book.alive()), self.owners())

    def __enter__(self) -> "Ledger":
        """Start counting."""
        self._fake_mode = active_fake_mode()
        if self._device_type == "cuda" and self._fake_mode is None:
            raise ValueError(
                '`device_type` "cuda" counts fake tensors only, enter FakeTensorMode first; '
                "on a real device the CUDA allocator counts, see ProcessMeter."
            )
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and count what it made."""
        if types and any(_is_wrapper(each) for each in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        grown: Record | None = None
        inputs: set[int] | None = None
        entries = self._book.entries
        for tensor in _flat(result):
            storage = tensor.untyped_storage()
            entry = entries.get(storage._cdata)
            if entry is not None:
                if storage.nbytes() != entry.record.nbytes:
                    grown = self._book.resize(entry, storage.nbytes())
            elif self._counts(tensor):
                if inputs is None:
                    inputs = _storages_of_inputs(func, args, kwargs)
                if storage._cdata not in inputs:
                    owner = self._owners.current
                    grown = self._book.add(storage, tensor, self._label(owner), owner.name)
        if grown is not None:
            tensor = storage = result = None if self._is_over() else result
            self._grown(grown)
        return result

    def _counts(self, tensor: Tensor) -> bool:
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        return mode is self._fake_mode and tensor.device.type == self._device_type

    def _label(self, owner: Owner) -> Category:
        if self._category is not None:
            return self._category
        label = _DEFAULT_CATEGORY[self._phase]
        return "head tiles" if owner.is_head and label == "layer working set" else label

    def _mark(self) -> None:
        book = self._book
        book.mark(self._phase)
        self.run_peak_bytes[self._phase] = max(self.run_peak_bytes.get(self._phase, 0), book.live_bytes)
        self._timeline.add(book.elapsed_s, book.live_bytes, self._phase)

    def _is_over(self) -> bool:
        return self.budget_bytes is not None and self._book.live_bytes > self.budget_bytes

    def _grown(self, record: Record) -> None:
        """Take note that `record` was born or grew, and stop if that went over the budget."""
        self._mark()
        if not self._is_over() or not record.nbytes or (self._on_exceed == "warn" and self.first_excess):
            return
        excess = Excess(sentence=self._sentence(record), table=self.table())
        self.first_excess = self.first_excess or excess
        if self._on_exceed == "strict":
            error = BudgetExceeded(excess.sentence)
            error.table = excess.table
            raise error

    def _sentence(self, record: Record) -> str:
        assert self.budget_bytes is not None
        dtype = str(record.dtype).removeprefix("torch.")
        return (
            f"{format_bytes(self.live_bytes)} are alive in {self._phase}, over the budget of "
            f"{format_bytes(self.budget_bytes)}, since `{record.owner or 'no module'}` made a tensor "
            f"{tuple(record.shape)} {dtype} of {format_bytes(record.nbytes)}."
        )

    def _phase_peak(self, phase: Phase) -> PhasePeak:
        peak = self._book.peaks[phase]
        records = list(self._book.alive_at(peak))
        return PhasePeak(
            peak_bytes=peak.live_bytes,
            at_s=peak.at_s,
            categories=sum_by_category(records),
            owners=largest_holders(records),
        )


class _AdoptGradient:
    """Labels a parameter's gradient once it is there."""

    def __init__(self, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._name = name

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._ledger.adopt(parameter.grad, "gradients", owner=self._name)


def _is_wrapper(cls: type) -> bool:
    return cls is not FakeTensor and "__tensor_flatten__" in dir(cls)


def _flat(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for each in result:
            yield from _flat(each)


def _plain_tensors(tensors: Tensor | Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that hold bytes: wrappers such as DTensor give way to what they wrap."""
    for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from _plain_tensors([getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]])
        else:
            yield tensor


def _storages_of_inputs(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Return the keys of the storages that `func` was given; an output that holds one of them is not new."""
    if func in _LIFT_FRESH:
        return set()
    given = args[1:] if func in _SET else args
    keys = {tensor.untyped_storage()._cdata for tensor in _flat(given)}
    if kwargs:
        keys.update(tensor.untyped_storage()._cdata for tensor in _flat(list(kwargs.values())))
    return keys
