"""The `planish` command: a verb and its arguments in, an exit code out; only the verb that runs is imported."""

import errno
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from planish import __version__
from planish.decode import nearest
from planish.errors import BudgetExceeded, Interrupted, PlanishError, UsageError, WorldFailed

VERBS = {
    "plan": "will it fit: what a run holds in each phase, before anything is loaded",
    "train": "train a model inside a memory budget",
    "verify": "check that a plan computes what plain PyTorch computes",
    "generate": "continue a prompt with a model",
    "eval": "loss and bits per byte of a model on held-out text",
    "compress": "a smaller child of a trained model, within measured limits",
    "report": "a run folder as one page of figures",
    "data": "what a corpus holds: `planish data stats`",
    "demo": "a real model on real text inside a budget, in minutes",
    "doctor": "what this machine has and what planish will use of it",
}
_REFUSED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EBADF)
_TABLE_LINES = 24


def main(argv: list[str] | None = None) -> int:
    """Run the verb that `argv` names and return the process's exit code."""
    words = sys.argv[1:] if argv is None else argv
    if sys.stderr is None:  # closed: what would be said there goes nowhere
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the life of the process
    if sys.stdout is None:
        return _refuse(
            "planish: the standard output is closed; direct it to a file or to /dev/null.", WorldFailed.exit_code
        )
    _prepare_libraries()
    try:
        with _terminable():
            code = _dispatch(words)
            sys.stdout.flush()
            return code
    except PlanishError as error:
        if isinstance(error, BudgetExceeded) and error.table:
            _refuse("\n".join(error.table.splitlines()[:_TABLE_LINES]), error.exit_code)
        return _refuse(f"planish: {error}", error.exit_code)
    except KeyboardInterrupt as stop:
        return _refuse(f"planish: {str(stop) or 'interrupted; nothing is left half written.'}", Interrupted.exit_code)
    except SystemExit as stop:
        return _exit_code(stop)
    except Exception as error:
        return _unexpected(error)
    finally:
        _drop_what_nobody_takes()


def _unexpected(error: Exception) -> int:
    """Say what no verb has caught: the world's refusal to take a write, or a fault of ours."""
    if isinstance(error, BrokenPipeError):
        return WorldFailed.exit_code
    if isinstance(error, OSError) and error.errno in _REFUSED_WRITES:
        where = error.filename or "the standard output"
        return _refuse(f"planish: {where} cannot be written: {error.strerror}.", WorldFailed.exit_code)
    traceback.print_exc()
    return _refuse("planish: this is a fault of planish, please report it with the lines above.", 1)


def _exit_code(stop: SystemExit) -> int:
    match stop.code:
        case None | 0:
            return 0
        case 1:  # rich, at a closed pipe
            return WorldFailed.exit_code
        case _:
            return UsageError.exit_code


def _refuse(text: str, code: int) -> int:
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
    return code


def _drop_what_nobody_takes() -> None:
    """Let the interpreter's own last flush succeed where the output is a closed pipe or a full disk."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind as Ctrl-C does, so that nothing is left half written."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _prepare_libraries() -> None:
    """Set what torch and transformers read when they are imported, unless the user chose otherwise.

    OpenMP threads sleep at barriers: spinning ones that lose their core to another process hold all others up; with
    one of two cores busy, a chain of small products takes 2.5 times as long (docs/log.md). The libraries' own reports
    and progress bars stay off the terminal: what matters in them is checked and said in one sentence.
    """
    settings = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "TRANSFORMERS_VERBOSITY": "critical",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)  # noqa: TID251 - the launcher


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return 0 if words else 2
    verb, *rest = words
    if verb == "--version":
        sys.stdout.write(f"planish {__version__}\n")
        return 0
    if verb not in VERBS:
        raise UsageError(f"no verb {verb!r}; {nearest(verb, VERBS)}")
    return importlib.import_module(f"planish.cli.{verb}").main(rest)


def _help() -> str:
    verbs = "\n".join(f"  {verb:<10}{meaning}" for verb, meaning in VERBS.items())
    return (
        "usage: planish VERB [...]\n\n"
        "Bounds every memory peak of training at launch, exactly, and says beforehand whether it fits.\n\n"
        f"{verbs}\n\n"
        "`planish VERB --help` says more.  Exit codes: 0 done, 1 a fault of ours, 2 usage or unreadable input,\n"
        "3 does not fit, 4 budget exceeded, 5 the world failed, 6 not verified or not finite, 130 interrupted.\n"
    )
