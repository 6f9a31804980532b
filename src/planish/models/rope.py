"""Rotary parameters from a run file in the place of a model's own, refused where they mean nothing."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from planish.decode import nearest
from planish.errors import UsageError

_KEPT = ("rope_theta", "partial_rotary_factor")  # what stays of a model's own when the type changes


def replace_rope(config: PretrainedConfig, rope: Mapping[str, Any]) -> float:
    """Lay `rope` over the rotary parameters of `config` and return how many positions it is meant for.

    That is `factor` times the positions of the model's training; without a factor there is no limit to know.

    Args:
        config: Of the language model, with the position limit of its training.
        rope: As in a `config.json`; where the model has parameters for each kind of layer, a table for each.

    Raises:
        UsageError: An unknown type or key, a missing one, a value that cannot be, or nothing that differs.
    """
    own = dict(config.rope_parameters or {})
    kinds = config.nested_rope_parameter_keys(own)
    if kinds and not (rope and rope.keys() <= set(kinds) and all(isinstance(each, Mapping) for each in rope.values())):
        raise UsageError(
            f"`model.rope` needs a table for each kind of layer that it changes; "
            f"write for example `model.rope.{kinds[0]} = {{...}}` (there are {', '.join(kinds)})."
        )
    new = own | {kind: _over(own[kind] or {}, rope[kind]) for kind in rope} if kinds else _over(own, rope)
    if new == own:
        raise UsageError("`model.rope` is what the model has already; leave it out or change something.")
    config.rope_parameters = new
    try:
        with _refusing_warnings():
            config.standardize_rope_params()
            config.validate_rope()
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error.args[0] if error.args else error).replace("rope_parameters", "model.rope")
        raise UsageError(f"`model.rope` cannot be used: {reason}.") from error
    changed = [config.rope_parameters[kind] for kind in rope] if kinds else [config.rope_parameters]
    return min(_reach(table, config.max_position_embeddings) for table in changed)


def _over(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("rope_type", own.get("rope_type", "default"))
    known = ("default", *ROPE_INIT_FUNCTIONS)
    if kind not in known:
        raise UsageError(f"`model.rope` has no `rope_type` {kind!r}; {nearest(str(kind), known)}")
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"`model.rope.{name}` must be finite, got {value}.")
    same = kind == own.get("rope_type", "default")
    return {**{name: value for name, value in own.items() if same or name in _KEPT}, "rope_type": kind, **given}


def _reach(table: Mapping[str, Any], positions: int) -> float:
    if "factor" not in table:
        return math.inf
    return table["factor"] * (table.get("original_max_position_embeddings") or positions)


@contextmanager
def _refusing_warnings() -> Iterator[None]:
    """Raise what transformers only warns of: a key without meaning for the type, a value that cannot be."""
    logger = logging.getLogger("transformers.modeling_rope_utils")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
    # That the factor is not the ratio of two limits is no fault: the limit is raised to the context only later.
    refused = [sentence for sentence in said if "does not match the ratio" not in sentence]
    if refused:
        raise ValueError(refused[0])
