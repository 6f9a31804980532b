"""A budget kept: by the ledger on a CPU, by the allocator's own limit on a CUDA device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from planish.errors import BudgetExceeded
from planish.memory.ledger import Ledger
from planish.units import format_bytes


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


def as_exceeded(error: BudgetExceeded | torch.OutOfMemoryError, ledger: Ledger) -> BudgetExceeded:
    """Return the error of a budget that did not hold, whoever found out."""
    if isinstance(error, BudgetExceeded):
        return error
    limit = "the device" if ledger.budget_bytes is None else f"the budget of {format_bytes(ledger.budget_bytes)}"
    reason = str(error).splitlines()[0]
    return BudgetExceeded(
        f"{ledger.current_phase}: {limit} does not hold what the step needs ({reason}); "
        "raise `memory.budget` or shorten `data.context`.",
        table=torch.cuda.memory_summary(abbreviated=True),
    )
