"""The `planish` command: a verb and its arguments in, an exit code out; only the verb that runs is imported."""

import importlib
import os
import sys
import traceback

from planish import __version__
from planish.decode import nearest
from planish.errors import PlanishError, UsageError

VERBS = {
    "plan": "will it fit: what a run holds in each phase, before anything is loaded",
    "train": "train a model inside a memory budget",
    "verify": "check that a plan computes what plain PyTorch computes",
    "generate": "continue a prompt with a model",
    "eval": "loss and bits per byte of a model on held-out text",
    "report": "a run folder as one page of figures",
    "data": "what a corpus holds: `planish data stats`",
    "demo": "a real model on real text inside a budget, in minutes",
    "doctor": "what this machine has and what planish will use of it",
}


def main(argv: list[str] | None = None) -> int:
    """Run the verb that `argv` names and return the process's exit code."""
    words = sys.argv[1:] if argv is None else argv
    _wait_without_spinning()
    try:
        return _dispatch(words)
    except PlanishError as error:
        sys.stderr.write(f"planish: {error}\n")
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the last flush finds a reader
        return 5
    except KeyboardInterrupt:
        sys.stderr.write("planish: interrupted; nothing was saved since the last checkpoint.\n")
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None) * 2
    except Exception:
        traceback.print_exc()
        sys.stderr.write("planish: this is a fault of planish, please report it with the lines above.\n")
        return 1


def _wait_without_spinning() -> None:
    """Let OpenMP threads sleep at barriers, unless the user chose otherwise; read once, when torch is imported.

    Spinning threads that lose their core to another process hold all others up: with one of two cores busy, a chain of
    small products takes 2.5 times as long (docs/log.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # noqa: TID251 - the launcher


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
