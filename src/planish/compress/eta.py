"""How far a stage is and how long it will take, said now and then."""

import time
from collections.abc import Callable

Note = Callable[[str], None]


def progress_of(note: Note, stage: str) -> Callable[[int, int], None]:
    """Return what a stage calls with what is done and what there is: a sentence at the end, and every five seconds."""
    start, last = time.perf_counter(), [0.0]

    def progress(done: int, total: int) -> None:
        now = time.perf_counter()
        if now - last[0] >= 5 or done == total:
            last[0] = now
            left = (now - start) / done * (total - done)
            note(f"{stage}: {done} of {total}" + (f", eta {left:.0f} s" if done < total else ""))

    return progress
