"""Ctrl-C and SIGTERM as a request that the loop answers after the step; a second Ctrl-C stops at once."""

import signal
import threading
from types import FrameType
from typing import Self


class StopSignal:
    """Becomes `requested` at the first SIGINT or SIGTERM while entered; restores the handlers afterwards."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
