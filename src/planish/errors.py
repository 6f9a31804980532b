"""The failures a user can meet, each with the exit code that `planish` returns for it."""


class PlanishError(Exception):
    """A run-time state with one clear sentence and an exit code; anything else is a fault of ours (1)."""

    exit_code = 1


class UsageError(PlanishError, ValueError):
    """Usage, configuration or input that cannot be read: nothing was started."""

    exit_code = 2


class DoesNotFit(PlanishError):
    """The plan's peak is above the budget: nothing was started."""

    exit_code = 3


class BudgetExceeded(PlanishError):
    """The bytes alive went over the budget while running; the last checkpoint is intact.

    Attributes:
        table: The bytes alive at that moment by category and owner, as text; empty where a file holds it already.
        over_bytes: By how much at that moment; more may have been needed later.
    """

    exit_code = 4

    def __init__(self, message: str, *, table: str = "", over_bytes: int = 0) -> None:
        super().__init__(message)
        self.table, self.over_bytes = table, over_bytes


class WorldFailed(PlanishError):
    """The world around the run failed: disk full, rank lost, file gone."""

    exit_code = 5


class CheckpointCorrupt(WorldFailed):
    """A checkpoint's files do not match what was written."""


class VerificationFailed(PlanishError):
    """Two computations that must agree do not."""

    exit_code = 6


class NotFinite(PlanishError):
    """A loss or gradient is NaN or infinite; the last good checkpoint is kept."""

    exit_code = 6


class Interrupted(PlanishError):
    """The user stopped the run; a checkpoint was saved first."""

    exit_code = 130
