"""How a child learns from its parent as a whole: the settings of a training run that `planish compress` leaves open."""

from typing import Any

from planish.cli.options import count
from planish.compress.tournament import MOST, least_steps
from planish.errors import UsageError
from planish.runfile import RunFile, load

_OPEN = ("train.", "distil.", "plan.", "model.freeze", "save.every", "memory.")
_TAKEN = {"train.steps": "`--distil-tokens`", "train.eval_every": "the end", "distil.from": "the parent"}
_ROWS = 8
_LR = 3e-4


def read_lessons(
    settings: list[tuple[str, Any]],
    *,
    tokens: str | None,
    model: str,
    text: tuple[str, ...],
    context: int,
    dtype: str,
    seed: int,
    tournament: str | None,
) -> RunFile | None:
    """Return the run of the lessons, its text and folders to be named later; None where no tokens are given.

    Args:
        settings: (dotted name, value) of a run file's tables and of flags.
        tokens: How many it reads, as the user wrote it.
        model: The parent.
        text: Its sources.
        context: Tokens of a row.
        dtype: "bf16" or "fp32".
        seed: Order of the text.
        tournament: Tokens of a tournament, as the user wrote them.

    Raises:
        UsageError: A setting that a child's lessons do not have, or one without lessons.
    """
    for name, _ in settings:
        if name in _TAKEN or not name.startswith(_OPEN):
            by = _TAKEN.get(name, "the options of `planish compress`")
            raise UsageError(f"`{name}` is not for a child's lessons, where {by} decides; leave it out.")
        if tokens is None and not name.startswith("memory."):
            raise UsageError(
                f"`{name}` has no effect without lessons; say how long they are with `--distil-tokens 1M`."
            )
    if tokens is None:
        if tournament is not None:
            raise UsageError("`--tournament` chooses who has lessons; say how long they are with `--distil-tokens 1M`.")
        return None
    base: list[tuple[str, Any]] = [
        ("model.from", model),
        ("model.dtype", dtype),
        ("data.train", list(text)),
        ("data.context", context),
        ("data.seed", seed),
        ("distil.from", model),
        ("train.global_tokens", _ROWS * context),
        ("train.lr", _LR),
    ]
    whole = load(None, [*base, ("train.steps", 2**40), *settings]).train
    wanted, each = count(tokens, name="--distil-tokens"), whole.global_tokens or context * whole.grad_accum
    if wanted < each:
        raise UsageError(
            f"`--distil-tokens` ({wanted:,}) must be at least the {each:,} tokens of one step; raise it, or lower "
            "`train.global_tokens`."
        )
    if tournament is not None and count(tournament, name="--tournament") < least_steps(MOST) * each:
        raise UsageError(
            f"`--tournament` ({tournament}) must be at least {least_steps(MOST) * each:,} tokens: {MOST} candidates at "
            f"most, and one step of {each:,} tokens for each in the first round."
        )
    steps = wanted // each
    length = [("train.steps", steps), ("train.warmup", steps // 20), ("save.every", max(1, steps // 10))]
    return load(None, [*base, *length, *settings])
