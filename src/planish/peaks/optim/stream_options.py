"""What StreamAdamW may be asked, and what is wrong with it."""

from collections.abc import Mapping
from typing import Any

TORCH_OPTIONS = {
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}
"""Options of torch's groups that have one value here."""


def check_choices(*, math: str, slots: int, engine: str, cpu_share: float | None) -> None:
    """Refuse choices of the whole optimizer.

    Raises:
        ValueError: The message names it, and what would do.
    """
    if math not in ("torch", "fused"):
        raise ValueError(f'`math` must be "torch" or "fused", got {math!r}.')
    if engine not in ("auto", "cpu", "device", "hybrid"):
        raise ValueError(f'`engine` must be "auto", "cpu", "device" or "hybrid", got {engine!r}.')
    if slots < 1:
        raise ValueError(f"`slots` must be 1 or more, got {slots}; 3 keep all lanes busy.")
    if cpu_share is not None and engine != "hybrid":
        raise ValueError(f'`cpu_share` is for `engine` = "hybrid", got {engine!r}; leave it out.')
    if cpu_share is not None and not 0 <= cpu_share <= 1:
        raise ValueError(f"`cpu_share` must be in [0, 1], got {cpu_share}; leave it out to have it measured.")


def check_group(group: Mapping[str, Any], index: int) -> None:
    """Refuse options of a group.

    Raises:
        ValueError: The message names group and option.
    """
    for name, usual in TORCH_OPTIONS.items():
        if group[name] != usual:
            raise ValueError(
                f"`{name}` of group {index} is {group[name]!r}, which StreamAdamW does not know; leave it out"
                f"{' and set `math`' if name in ('foreach', 'fused') else ''}."
            )
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"`{name}` of group {index} must be 0 or more, got {group[name]}.")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"`betas` of group {index} must be in [0, 1), got {group['betas']}.")
