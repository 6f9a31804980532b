"""A budget kept: by the ledger on a CPU, by the allocator's own limit on a CUDA device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from planish.errors import BudgetExceeded
from planish.memory.ledger import Ledger
from planish.units import format_bytes

_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"


@contextmanager
def counted(ledger: Ledger, device: torch.device) -> Iterator[None]:
    """Hold what happens inside to the ledger's budget: entered on a CPU, the allocator's limit on a CUDA device.

    On CUDA the ledger's phases may be named and count nothing; `ProcessMeter` reads the allocator, which is exact.
    """
    if device.type == "cpu":
        with ledger:
            yield
        return
    if ledger.budget_bytes is not None:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, ledger.budget_bytes / total_bytes), device)
    yield


@contextmanager
def exceeding(ledger: Ledger) -> Iterator[None]:
    """Let what does not fit in memory inside end as `BudgetExceeded`, whoever found out."""
    try:
        yield
    except BudgetExceeded:
        raise
    except (MemoryError, RuntimeError) as error:
        exceeded = _as_exceeded(error, ledger)
        if exceeded is None:
            raise
        raise exceeded from None


def _as_exceeded(error: Exception, ledger: Ledger) -> BudgetExceeded | None:
    """Return the error of memory that did not suffice; None where it is another one."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    remedy = "raise `memory.budget` or shorten `data.context`"
    if isinstance(error, torch.OutOfMemoryError):
        limit = "the device" if ledger.budget_bytes is None else f"the budget of {format_bytes(ledger.budget_bytes)}"
        table = torch.cuda.memory_summary(abbreviated=True)
    elif isinstance(error, MemoryError) or _NO_MEMORY in reason:
        reason = reason[reason.find(_NO_MEMORY) :] if _NO_MEMORY in reason else reason
        limit = f"this machine, with {format_bytes(ledger.live_bytes)} of tensors alive,"
        remedy = "bound the largest of those alive or shorten `data.context`"
        table = ledger.table()
    else:
        return None
    sentence = f"{ledger.current_phase}: {limit} does not hold what the step needs ({reason}); {remedy}."
    return BudgetExceeded(sentence, table=table)
