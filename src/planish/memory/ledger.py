"""The ledger: an exact count of the bytes that tensors hold, by phase, category and owner, held to a budget."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

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
from planish.memory.tensors import makes_views, plain_tensors_in, storages_given, tensors_in
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

# PyTorch asks each fake tensor for its device as often as it runs operations, and nothing is born of the answer.
_DEVICE = torch.ops.prim.device.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A moment at which the bytes alive went over the budget.

    Attributes:
        sentence: Phase, tensor, bytes alive and budget, in one sentence.
        table: Bytes alive at that moment by category and owner, as text.
        over_bytes: By how much.
    """

    sentence: str
    table: str
    over_bytes: int

    def error(self) -> BudgetExceeded:
        """Return it as an error."""
        return BudgetExceeded(self.sentence, table=self.table, over_bytes=self.over_bytes)


class Ledger(TorchDispatchMode):
    """Counts every storage that a tensor operation makes inside it, from birth to death.

    Each storage counts once, with the bytes it has at the moment: views cost nothing, an operation in place makes
    nothing, `resize_` is followed. Tensors made before count once they are adopted. Distributed tensors count as
    their local shards. Under `FakeTensorMode` (entered first) the run's own fake tensors count, and give the numbers
    of a real run.

    Only tensors on `device_type` count, real ones on "cpu" alone: on a CUDA device the allocator's own statistics are
    exact and free, see `ProcessMeter`. There the ledger is not entered; its phases, categories and steps may still be
    named, and count nothing.

    Memory:    no tensor is kept alive; about 2 KiB for each storage that is alive or was at a phase's peak.
    Exactness: equal to the bytes of all live storages after every operation of this thread; what an operation
        allocates and frees inside itself is not seen.

    Args:
        budget_bytes: Bytes that may be alive at any moment, None for no limit; may be set anew at any time.
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
        self._on_exceed = on_exceed
        self._device_type = device_type
        self._fake_mode: Any = None
        self._book = Book()
        self._timeline = Timeline()
        self._owners = OwnerTracker()
        self._phase: Phase = "init"
        self._phase_depth = 0
        self._category: Category | None = None
        self._step: int | None = None
        self._past_peaks: dict[Phase, int] = {}

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
    def run_peak_bytes(self) -> dict[Phase, int]:
        """The peak of each phase over all steps."""
        now = self.peak_bytes
        phases = in_phase_order(self._past_peaks | now)
        return {phase: max(self._past_peaks.get(phase, 0), now.get(phase, 0)) for phase in phases}

    @property
    def timeline(self) -> tuple[Point, ...]:
        """(seconds since the step began, live bytes, phase), at most 2,000 points, the largest always among them."""
        return self._timeline.points()

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count what happens inside as phase `name`; outside of all phases it is "init"."""
        before, self._phase = self._phase, name
        self._phase_depth += 1
        self._mark()
        try:
            yield
        finally:
            self._mark()
            self._phase = before
            self._phase_depth -= 1
            if self._phase_depth:
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
        for tensor in plain_tensors_in(tensors if isinstance(tensors, Tensor) else list(tensors)):
            storage = tensor.untyped_storage()
            entry = self._book.entries.get(storage._cdata)
            if entry is not None:
                self._book.relabel(entry.record, category, owner)
            elif self._counts(tensor):
                self._check(self._book.add(storage, tensor, category, owner or ""))

    @contextlib.contextmanager
    def watch(self, model: nn.Module, head: nn.Module | None = None) -> Iterator[None]:
        """Name the owners of what `model` makes, and adopt its parameters, buffers and gradients, while inside.

        Args:
            model: Its modules' paths become the owners of births in forward, recomputation and backward.
            head: The module that makes the logits; its births and those of the loss are "head tiles".
        """
        for name, parameter in model.named_parameters():
            self.adopt(parameter, "parameters", owner=name)
        for name, buffer in model.named_buffers():
            self.adopt(buffer, "other", owner=name)
        handles = self._owners.attach(model, head)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = functools.partial(self._adopt_gradient, name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def start_step(self, step: int) -> None:
        """Begin to record `step`: peaks and timeline start afresh."""
        self._past_peaks = self.run_peak_bytes
        self._step = step
        self._book.forget_peaks()
        self._timeline.clear()
        if self._phase_depth:
            self._mark()

    def end_step(self) -> StepMemory:
        """Return what was recorded since the step began (since the start, before the first step)."""
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
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._followed(self._resize)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop counting; what is alive stays on the books."""
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and count what it made."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if types and any(each is not FakeTensor and is_traceable_wrapper_subclass_type(each) for each in types):
            return NotImplemented  # it comes back as operations on what is wrapped
        result = func(*args, **(kwargs or {}))
        if makes_views(func):
            return result  # as many operations as all others together
        grown = self._take_in(result, func, args, kwargs)
        if grown:
            excess = self._note(grown)
            if excess is not None:
                del result  # the traceback keeps this frame, which must not keep the tensor
                raise excess.error()
        return result

    def _take_in(self, result: Any, func: Any, args: Any, kwargs: Any) -> list[Record]:
        """Return the records of what `func` made or resized."""
        entries = self._book.entries
        grown: list[Record] = []
        given: set[int] | None = None
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            storage = tensor.untyped_storage()
            entry = entries.get(storage._cdata)
            if entry is not None:
                if storage.nbytes() != entry.record.nbytes:
                    grown.append(self._book.resize(entry, storage.nbytes()))
            elif self._counts(tensor):
                if given is None:
                    given = storages_given(func, args, kwargs)
                if storage._cdata not in given:
                    grown.append(self._born(storage, tensor))
        return grown

    def _counts(self, tensor: Tensor) -> bool:
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        return mode is self._fake_mode and tensor.device.type == self._device_type

    def _born(self, storage: torch.UntypedStorage, tensor: Tensor) -> Record:
        owner = self._owners.current
        return self._book.add(storage, tensor, self._label(owner), owner.name or self._phase)

    def _label(self, owner: Owner) -> Category:
        if self._category is not None:
            return self._category
        label = _DEFAULT_CATEGORY[self._phase]
        return "head tiles" if owner.is_head and label == "layer working set" else label

    def _adopt_gradient(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.adopt(parameter.grad, "gradients", owner=name)

    def _followed(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        """Return `UntypedStorage.resize_` that tells the book; it is no operation, so no mode ever sees it."""

        @functools.wraps(resize)
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            entry = self._book.entries.get(storage._cdata)
            if entry is not None and storage.nbytes() != entry.record.nbytes:
                self._check(self._book.resize(entry, storage.nbytes()))
            return result

        return resize_

    def _mark(self) -> None:
        seconds = self._book.mark(self._phase)
        self._timeline.add(seconds, self._book.live_bytes, self._phase)

    def _note(self, grown: list[Record]) -> Excess | None:
        """Take note of what was born or resized; return what to raise if that broke the budget."""
        self._mark()
        budget_bytes = self.budget_bytes
        if budget_bytes is None or self._book.live_bytes <= budget_bytes:
            return None
        largest = max(grown, key=lambda record: record.nbytes)
        if not largest.nbytes or (self._on_exceed == "warn" and self.first_excess is not None):
            return None
        over_bytes = self._book.live_bytes - budget_bytes
        excess = Excess(sentence=self._sentence(largest, budget_bytes), table=self.table(), over_bytes=over_bytes)
        if self.first_excess is None:
            self.first_excess = excess
        return excess if self._on_exceed == "strict" else None

    def _check(self, record: Record) -> None:
        excess = self._note([record])
        if excess is not None:
            raise excess.error()

    def _sentence(self, record: Record, budget_bytes: int) -> str:
        dtype = str(record.dtype).removeprefix("torch.")
        over = format_bytes(self.live_bytes - budget_bytes)
        return (
            f"{self._phase}: a {tuple(record.shape)} {dtype} tensor of {format_bytes(record.nbytes)} for "
            f"`{record.owner}` takes the bytes alive to {format_bytes(self.live_bytes)}, {over} over the budget of "
            f"{format_bytes(budget_bytes)}; raise `memory.budget` or bound the largest of those alive."
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
