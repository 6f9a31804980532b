"""How a transformers model's attention becomes ours, on one rank or over those that share rows."""

from functools import partial
from typing import Any, assert_never

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from planish.comm.ring import Circle
from planish.errors import UsageError
from planish.methods import Attention, Packed, Plain
from planish.models.anatomy import find
from planish.models.load import text_config
from planish.models.part import Part
from planish.peaks.attention.packed import packed_attention

ATTENTION_NAME = "planish"
# Rotary tables that depend on the longest position of the batch, which a span does not know.
_BY_LENGTH = ("dynamic", "longrope")


def install_attention(model: PreTrainedModel, method: Attention, sequence: Circle | None = None) -> Part | None:
    """Let `model` run its attention by `method`, over the ranks that share rows if there are any.

    Raises:
        UsageError: A model that mixes tokens of a row otherwise too, where ranks hold spans of rows.
    """
    if sequence is not None and not isinstance(method, Packed):
        raise UsageError("rows over ranks need `plan.attention` = packed, which brings queries and keys together.")
    match method:
        case Plain():
            return None
        case Packed():
            before = model.config._attn_implementation
            name = ATTENTION_NAME
            AttentionInterface.register(name, packed_attention)
            if sequence is not None:
                _refuse_other_ways(model)
                name = f"{ATTENTION_NAME}-{id(model):x}"
                AttentionInterface.register(name, partial(packed_attention, circle=sequence))
            model.set_attn_implementation(name)
            handle = model.get_decoder().register_forward_pre_hook(_refuse_left_padding, with_kwargs=True)

            def restore() -> None:
                handle.remove()
                model.set_attn_implementation(before)

            over = "" if sequence is None else f", rows over {sequence.size} ranks"
            return Part(sentence=f"attention: {before} -> {ATTENTION_NAME}{over}", restore=restore)
        case _:
            assert_never(method)


def _refuse_left_padding(_module: nn.Module, _args: object, inputs: dict[str, Any]) -> None:
    """Refuse a mask that hides a token before one that it shows: without a mask function nothing would hide it."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise UsageError(
            "`attention_mask` hides tokens on the left, which packed attention would see; pad on the right, or set "
            "`plan.attention` = plain."
        )


def _refuse_other_ways(model: PreTrainedModel) -> None:
    """Refuse a model in which tokens of a row meet elsewhere than in attention."""
    name = type(model).__name__
    for path, layer in find(model).layers.items():
        if any(isinstance(each, nn.Conv1d) for each in layer.modules()):
            raise UsageError(
                f"`mesh.cp` gives each rank a span of every row, and `{path}` of {name} carries a state along whole "
                "rows; leave `mesh.cp` out."
            )
    rope = text_config(model.config).to_dict().get("rope_parameters") or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    found = [each["rope_type"] for each in kinds if each.get("rope_type") in _BY_LENGTH]
    if found:
        raise UsageError(
            f"`mesh.cp` gives each rank a span of every row, and the {found[0]!r} rotary tables of {name} depend on "
            'whole ones; set `model.rope` to another type, such as "yarn", or leave `mesh.cp` out.'
        )
