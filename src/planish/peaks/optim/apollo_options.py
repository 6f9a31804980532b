"""APOLLO's options: one checked dataclass for a parameter group, and the names that transformers gives them."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from torch import nn

from planish.peaks.optim.apollo_random import Projection
from planish.price.apollo import MatrixShape, Side

Granularity = Literal["channel", "tensor"]
Limiter = Literal["safe", "paper", "off"]
Refresh = Literal["keep", "reset"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "granularity": get_args(Granularity),
    "limiter": get_args(Limiter),
    "side": get_args(Side),
    "projection": get_args(Projection),
    "refresh": get_args(Refresh),
}
_NAMES = {
    "rank": "proj_rank",
    "scale_type": "granularity",
    "update_proj_gap": "update_gap",
    "proj": "projection",
    "proj_type": "side",
}
_VALUES = {"projection": {"random": "rademacher"}, "side": {"std": "auto"}}
_TRANSFORMERS_DEFAULTS = {"rank": 128, "scale_type": "channel", "scale": 1.0, "update_proj_gap": 200}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApolloOptions:
    """The options of a projected parameter group; `planish.optim.Apollo` says what each does."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    proj_rank: int
    granularity: Granularity
    alpha: float | Literal["auto"]
    limiter: Limiter
    growth: float
    update_gap: int
    side: Side
    projection: Projection
    refresh: Refresh
    seed: int

    def __post_init__(self) -> None:
        if self.projection == "svd":
            raise ValueError(
                '`projection` "svd" is not offered: the APOLLO paper finds a random projection on par with it, and '
                'an SVD of each gradient takes longer than the step; use "rademacher".'
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                words = ", ".join(f'"{each}"' for each in allowed)
                raise ValueError(f"`{name}` must be one of {words}, got {getattr(self, name)!r}.")
        for name in ("proj_rank", "update_gap"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"`{name}` must be a whole number above 0, got {value!r}.")
        if not self.growth >= 1:
            raise ValueError(f"`growth` must be 1 or more, got {self.growth}; the paper's is 1.01.")
        if self.alpha != "auto" and not (isinstance(self.alpha, float | int) and 0 < self.alpha < math.inf):
            raise ValueError(f'`alpha` must be a number above 0 or "auto", got {self.alpha!r}.')
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"`seed` must be in [0, 2^64), got {self.seed}.")

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> "ApolloOptions":
        """Return the options of a parameter group of the optimizer."""
        return cls(**{field.name: group[field.name] for field in fields(cls)})

    def shape_of(self, shape: Sequence[int]) -> MatrixShape:
        """Return how a parameter of this group is projected.

        Raises:
            ValueError: `proj_rank` does not fit the parameter.
        """
        matrix = MatrixShape.of(shape, self.side)
        if self.proj_rank > matrix.dim:
            raise ValueError(
                f"`proj_rank` ({self.proj_rank}) must not exceed the projected dimension ({matrix.dim}) of a parameter "
                f"{list(shape)}; lower it, or put the parameter in a group with `proj_rank` = None (AdamW)."
            )
        if self.projection == "identity" and self.proj_rank != matrix.dim:
            raise ValueError(
                f'`projection` "identity" needs `proj_rank` ({self.proj_rank}) equal to the projected dimension '
                f'({matrix.dim}) of a parameter {list(shape)}; use "rademacher" for a smaller one.'
            )
        return matrix

    def scale_of(self, matrix: MatrixShape) -> float:
        """Return alpha; "auto" makes up for the projection, so that AdamW's learning rate fits."""
        return math.sqrt(matrix.dim / self.proj_rank) if self.alpha == "auto" else float(self.alpha)


def alpha_of_scale(scale: float) -> float:
    """Return the alpha that transformers' `scale` stands for: its square root."""
    if not 0 < scale < math.inf:
        raise ValueError(f"`scale` must be a number above 0, got {scale!r}; `scale` 128 is `alpha` 11.3.")
    return math.sqrt(scale)


def translate_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` with transformers' names and values for APOLLO replaced by ours; others stay as they are.

    Raises:
        ValueError: Both names of one option are given, or one that would have no effect.
    """
    if "scale_front" in options:
        raise ValueError("`scale_front` has no meaning here: the limiter bounds growth, which no factor changes.")
    translated = {name: value for name, value in options.items() if name not in _NAMES and name != "scale"}
    pairs = [(_NAMES[name], name, value) for name, value in options.items() if name in _NAMES]
    if options.get("scale") is not None:
        pairs.append(("alpha", "scale", alpha_of_scale(options["scale"])))
    for name, given, value in pairs:
        if name in translated:
            raise ValueError(f"`{given}` and `{name}` are two names of one option; give one of them.")
        translated[name] = _VALUES.get(name, {}).get(value, value)
    return translated


def read_transformers(optim_args: str) -> dict[str, Any]:
    """Return `Apollo`'s keyword arguments for transformers' `optim_args`, with transformers' defaults.

    Example:
        >>> read_transformers("rank=1,scale_type=tensor,scale=128")["granularity"]
        'tensor'

    Raises:
        ValueError: An unknown name, or a value that is no number where one is needed.
    """
    given: dict[str, Any] = dict(_TRANSFORMERS_DEFAULTS)
    for pair in filter(None, optim_args.replace(" ", "").split(",")):
        name, _, value = pair.partition("=")
        if name not in (*_NAMES, "scale"):
            raise ValueError(f"`optim_args` has no option {name!r}; known: {', '.join([*_NAMES, 'scale'])}.")
        try:
            given[name] = (
                float(value) if name == "scale" else int(value) if name in ("rank", "update_proj_gap") else value
            )
        except ValueError as error:
            raise ValueError(f"`optim_args` needs a number for {name!r}, got {value!r}.") from error
    return translate_names(given)


def split_parameters(
    model: nn.Module, target_modules: str | Sequence[str]
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (projected, rest) of the parameters that train, chosen as transformers' `optim_target_modules` does.

    Args:
        model: Its linear layers may be targets.
        target_modules: "all-linear", a regular expression that a module's whole path matches, or several parts of
            paths or regular expressions.

    Raises:
        ValueError: No linear layer is a target.
    """

    def is_target(path: str) -> bool:
        if isinstance(target_modules, str):
            everything = target_modules.replace("_", "-") == "all-linear"
            return everything or re.fullmatch(target_modules, path) is not None
        return any(part in path or re.fullmatch(part, path) is not None for part in target_modules)

    targets = {
        id(each.weight) for path, each in model.named_modules() if isinstance(each, nn.Linear) and is_target(path)
    }
    params = [param for param in model.parameters() if param.requires_grad]
    projected = [param for param in params if id(param) in targets]
    if not projected:
        raise ValueError(
            f'`target_modules` ({target_modules!r}) names no linear layer; "all-linear" takes all of them.'
        )
    return projected, [param for param in params if id(param) not in targets]
