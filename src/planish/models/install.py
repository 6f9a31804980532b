"""A transformers model and a plan in, the same model with planish's parts in place out; undone on request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from transformers import AttentionInterface, PreTrainedModel

from planish.errors import UsageError
from planish.methods import Attention, Batched, Blocked, Boundary, Checkpoint, Dispatch, Packed, Plain, Plan, Vocab
from planish.models.anatomy import find
from planish.models.forward import loss_forward
from planish.models.head import head_loss
from planish.peaks.attention.packed import packed_attention

ATTENTION_NAME = "planish"


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What `install` replaced: a sentence for each part, and the way back."""

    replaced: tuple[str, ...]
    restore: tuple[Callable[[], None], ...]

    def undo(self) -> None:
        """Put every replaced part back, last first."""
        for each in reversed(self.restore):
            each()


def install(model: PreTrainedModel, plan: Plan) -> Installed:
    """Put the plan's methods into `model` through transformers' own seams; any loop or trainer may run it then.

    With a bounded head the model called with `labels` returns the same loss and no logits.

    Memory:        nothing is allocated.
    Exactness:     loss and gradients equal up to the order of summation.

    Args:
        model: Any transformers causal LM.
        plan: One method per peak.

    Returns:
        What was replaced, with `undo()`.

    Raises:
        UsageError: A model without the parts that the plan's methods replace.

    Example:
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> tiny = LlamaConfig(
        ...     vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
        ... )
        >>> installed = install(AutoModelForCausalLM.from_config(tiny), Plan())
        >>> installed.replaced[0]
        'attention: sdpa -> planish'
        >>> installed.undo()
    """
    replaced: list[str] = []
    restore: list[Callable[[], None]] = []
    _install_attention(model, plan.attention, replaced, restore)
    _install_dispatch(model, plan.dispatch, replaced, restore)
    _install_boundary(model, plan.boundary, replaced, restore)
    _install_head(model, plan.vocab, replaced, restore)
    return Installed(replaced=tuple(replaced), restore=tuple(restore))


def _install_attention(
    model: PreTrainedModel, method: Attention, replaced: list[str], restore: list[Callable[[], None]]
) -> None:
    match method:
        case Plain():
            return
        case Packed():
            before = model.config._attn_implementation
            AttentionInterface.register(ATTENTION_NAME, packed_attention)
            model.set_attn_implementation(ATTENTION_NAME)
            replaced.append(f"attention: {before} -> {ATTENTION_NAME}")
            restore.append(lambda: model.set_attn_implementation(before))
        case _:
            assert_never(method)


def _install_dispatch(
    model: PreTrainedModel, method: Dispatch, replaced: list[str], restore: list[Callable[[], None]]
) -> None:
    match method:
        case Plain():
            return
        case Batched():
            if not model._can_set_experts_implementation():
                raise UsageError(f"`plan.dispatch` = batched needs experts, and {type(model).__name__} has none.")
            before = model.get_experts_implementation()
            model.set_experts_implementation("batched_mm")
            replaced.append(f"experts: {before['']} -> batched_mm")
            restore.append(lambda: model.set_experts_implementation(before))
        case _:
            assert_never(method)


def _install_boundary(
    model: PreTrainedModel, method: Boundary, replaced: list[str], restore: list[Callable[[], None]]
) -> None:
    match method:
        case Plain():
            return
        case Checkpoint():
            if model.is_activation_checkpointing:
                return
            model.activation_checkpointing_enable({"use_reentrant": False})
            replaced.append("layers: checkpointed, each keeps its input alone")
            restore.append(model.activation_checkpointing_disable)
        case _:
            assert_never(method)


def _install_head(
    model: PreTrainedModel, method: Vocab, replaced: list[str], restore: list[Callable[[], None]]
) -> None:
    match method:
        case Plain():
            return
        case Blocked():
            anatomy = find(model)
            before = model.__dict__.get("forward")
            model.forward = loss_forward(anatomy, head_loss(anatomy, method))
            replaced.append(f"{anatomy.head_name} and loss: no logits where labels are given")

            def put_back() -> None:
                if before is None:
                    del model.forward
                else:
                    model.forward = before

            restore.append(put_back)
        case _:
            assert_never(method)
