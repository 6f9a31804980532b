"""A transformers model and a plan in, the same model with planish's parts in place out; undone on request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import assert_never

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from planish.comm.ring import Circle
from planish.errors import UsageError
from planish.memory.far import FarTier
from planish.methods import (
    Activation,
    Batched,
    Blocked,
    Boundary,
    Checkpoint,
    Dispatch,
    Offload,
    Pipelined,
    Plain,
    Plan,
    Ring,
    Tiled,
    Vocab,
    keeps_attention,
)
from planish.models.anatomy import find
from planish.models.attention import install_attention
from planish.models.embedding import share_embedding
from planish.models.experts import Seen, Shared, find_experts, install_experts
from planish.models.feed_forward import replace_feed_forwards
from planish.models.forward import loss_forward
from planish.models.head import head_loss
from planish.models.norms import tile_norms
from planish.models.part import Part
from planish.models.rotary import tile_rotations
from planish.peaks.activation.keep import Keeper
from planish.peaks.boundary.offload import FarBudget, open_store
from planish.peaks.boundary.remembered import Run, remembering
from planish.price.boundary import Depth
from planish.price.config import read_config

Label = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What `install` replaced.

    Attributes:
        replaced: A sentence for each part.
        restore: The way back, in their order.
        keepers: What keeps activations, by network.
        tiers: Far memory that was taken.
        end_tape: What to call where layers of one microbatch end and those of another may begin.
    """

    replaced: tuple[str, ...]
    restore: tuple[Callable[[], None], ...]
    keepers: Mapping[str, Keeper]
    tiers: tuple[FarTier, ...] = ()
    end_tape: tuple[Callable[[], None], ...] = ()

    def undo(self) -> None:
        """Put every replaced part back, last first."""
        for each in reversed(self.restore):
            each()


def install(  # noqa: PLR0913 (keyword-only options)
    model: nn.Module,
    plan: Plan,
    *,
    tokens: int | None = None,
    label: Label = lambda *_: None,
    seen: Seen = lambda _: None,
    dry: bool = False,
    experts: dist.ProcessGroup | None = None,
    vocab: dist.ProcessGroup | None = None,
    sequence: Circle | None = None,
    in_flight: int = 1,
) -> Installed:
    """Put the plan's methods into `model` through transformers' own seams; any loop or trainer may run it then.

    With a bounded head the model called with `labels` returns the same loss and no logits.

    Memory:        nothing is allocated, but for offloaded boundaries their far memory and its staging, and for packed
                   activations their arena, for as long as they are installed.
    Exactness:     loss and gradients equal up to the order of summation.

    Args:
        model: Any transformers causal LM, or what is wrapped around one, as peft does.
        plan: One method per peak.
        tokens: Rows x context of the largest microbatch of any rank; `boundary = offload`, `activation = bitmap` and
            `experts` size by it.
        label: Told of each boundary that is back on the device, by layer.
        seen: Told of the load of each layer of experts that runs, with `dispatch = pipelined`.
        dry: The model's tensors are fake: far memory is accounted for and not taken, nothing packed.
        experts: Ranks that the experts are spread over, as DTensors with `Shard(0)`; needs `dispatch = pipelined`.
        vocab: Ranks that share head and embedding, as DTensors with `Shard(0)`; needs `vocab = ring`.
        sequence: Ranks that share rows, in the order of their spans (`shapes.spans`); needs `attention = packed`. The
            model is then called with a span's `input_ids` and `position_ids`, and with `cu_seq_lens_q` of whole rows
            as Python ints; with `labels` of the span each rank's loss is its part of the mean over all.
        in_flight: Microbatches between forward and backward at once, for which `boundary = offload` takes far memory.

    Returns:
        What was replaced, with `undo()`.

    Raises:
        UsageError: A model without the parts that the plan's methods replace, or far memory that cannot be had.

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
    model = _transformers_model(model)
    if experts is not None and tokens is None:
        raise UsageError("`experts` needs `tokens`, rows x context of the largest microbatch of any rank.")
    shared = None if experts is None else Shared(group=experts, tokens=tokens, dry=dry)
    done: list[Part] = []
    keepers: dict[str, Keeper] = {}

    def activation() -> Part | None:
        waiting = isinstance(plan.boundary, Plain)
        replaced = replace_feed_forwards(model, plan.activation, tokens=tokens, waiting=waiting, dry=dry)
        if replaced is None:
            return None
        keepers.update(replaced.keepers)
        return Part(sentence=replaced.sentence, restore=replaced.restore)

    try:
        for part in (
            lambda: install_attention(model, plan.attention, sequence),
            activation,
            *(partial(_by_tokens, model, plan.activation, each) for each in (tile_norms, tile_rotations)),
            lambda: _boundary(model, plan.boundary, tokens=tokens, in_flight=in_flight, label=label, dry=dry),
            lambda: _dispatch(model, plan.dispatch, seen=seen, dry=dry, shared=shared),
            lambda: _embedding(model, plan.vocab, vocab),
            lambda: _head(model, plan.vocab, vocab, sequence),
        ):
            done += [each for each in [part()] if each is not None]
    except BaseException:
        for each in reversed(done):
            each.restore()
        raise
    return Installed(
        replaced=tuple(each.sentence for each in done),
        restore=tuple(each.restore for each in done),
        keepers=keepers,
        tiers=tuple(tier for each in done for tier in each.tiers),
        end_tape=tuple(each.end_tape for each in done if each.end_tape is not None),
    )


def _transformers_model(module: nn.Module) -> PreTrainedModel:
    """Return the outermost transformers model in `module`."""
    found = next((each for each in module.modules() if isinstance(each, PreTrainedModel)), None)
    if found is None:
        raise UsageError(f"{type(module).__name__} holds no transformers model; give `install` a causal LM.")
    return found


def _by_tokens(model: PreTrainedModel, method: Activation, tile: Callable[..., Part | None]) -> Part | None:
    return tile(model, method.tile_bytes) if isinstance(method, Tiled) and method.norms else None


def _dispatch(model: PreTrainedModel, method: Dispatch, *, seen: Seen, dry: bool, shared: Shared | None) -> Part | None:
    if shared is not None and not isinstance(method, Pipelined):
        raise UsageError("experts over ranks need `plan.dispatch` = pipelined, which moves tokens to them.")
    match method:
        case Plain():
            return None
        case Batched():
            if not model._can_set_experts_implementation():
                raise UsageError(f"`plan.dispatch` = batched needs experts, and {type(model).__name__} has none.")
            before = model.get_experts_implementation()
            model.set_experts_implementation("batched_mm")
            return Part(
                sentence=f"experts: {before['']} -> batched_mm",
                restore=lambda: model.set_experts_implementation(before),
            )
        case Pipelined():
            found = find_experts(model, find(model).layers)
            if not found.modules:
                return None
            before = model.get_experts_implementation()[""]
            return Part(
                sentence=f"experts: {before} -> planish, in tiles of fixed bytes"
                + ("" if shared is None else f", over {shared.group.size()} ranks"),
                restore=install_experts(model, found, method, seen=seen, dry=dry, shared=shared),
            )
        case _:
            assert_never(method)


def _boundary(
    model: PreTrainedModel, method: Boundary, *, tokens: int | None, in_flight: int, label: Label, dry: bool
) -> Part | None:
    match method:
        case Plain():
            return None
        case Checkpoint():
            return _checkpoint(model, method, label=label)
        case Offload():
            return _offload(model, method, tokens=tokens, in_flight=in_flight, label=label, dry=dry)
        case _:
            assert_never(method)


def _checkpoint(model: PreTrainedModel, method: Checkpoint, *, label: Label) -> Part | None:
    if method.keep_attention:
        restore = _through(model, lambda index, run: remembering(index, run, label=label))
        return Part(sentence="layers: checkpointed, each keeps its input and attention's output", restore=restore)
    if model.is_activation_checkpointing:
        return None
    return Part(
        sentence="layers: checkpointed, each keeps its input alone", restore=_through(model, lambda _, run: run)
    )


def _through(model: PreTrainedModel, wrap: Callable[[int, Run], Run]) -> Callable[[], None]:
    """Checkpoint each layer by what `wrap` makes of (layer's number, its checkpoint); return the way back."""
    active = model.is_activation_checkpointing
    if not active:
        model.activation_checkpointing_enable({"use_reentrant": False})
    layers = list(find(model).layers.values())
    before = [layer._gradient_checkpointing_func for layer in layers]
    for index, layer in enumerate(layers):
        layer._gradient_checkpointing_func = wrap(index, before[index])

    def restore() -> None:
        for layer, run in zip(layers, before, strict=True):
            layer._gradient_checkpointing_func = run
        if not active:
            model.activation_checkpointing_disable()

    return restore


def _offload(
    model: PreTrainedModel, method: Offload, *, tokens: int | None, in_flight: int, label: Label, dry: bool
) -> Part:
    if tokens is None:
        raise UsageError("`plan.boundary` = offload needs `tokens`, rows x context of the largest microbatch.")
    anatomy = find(model)
    num_layers = len(anatomy.layers)
    shapes = read_config(model.config.to_dict()).layers if keeps_attention(method) else ()
    depth = Depth.of(
        num_boundaries=num_layers,
        tokens=tokens,
        width=anatomy.hidden_size,
        itemsize=model.dtype.itemsize,
        kept=[each.attention for each in shapes],
    )
    store = open_store(
        replace(depth, in_flight=in_flight),
        FarBudget(host_bytes=method.host or 0, disk_bytes=method.disk or 0, folder=method.folder),
        device=model.device,
        every=method.every,
        dry=dry,
        label=label,
    )
    uncheckpoint = _through(model, store.checkpoint)

    def restore() -> None:
        uncheckpoint()
        store.close()

    far = len(store.boundaries.offloaded)
    return Part(
        sentence=f"layers: checkpointed, {far} of {num_layers} inputs wait in far memory",
        restore=restore,
        tiers=store.tiers,
        end_tape=store.end_tape,
    )


def _embedding(model: PreTrainedModel, method: Vocab, group: dist.ProcessGroup | None) -> Part | None:
    """Replace the embedding where ranks share the vocabulary."""
    if group is None:
        return None
    if not isinstance(method, Ring):
        raise UsageError("a vocabulary over ranks needs `plan.vocab` = ring, which brings tokens and rows together.")
    return Part(
        sentence=f"embedding: rows on {group.size()} ranks",
        restore=share_embedding(model, Circle.of(group), tile_bytes=method.tile_bytes),
    )


def _head(
    model: PreTrainedModel, method: Vocab, group: dist.ProcessGroup | None, sequence: Circle | None
) -> Part | None:
    match method:
        case Plain():
            return None
        case Blocked() | Ring():
            anatomy = find(model)
            before = model.__dict__.get("forward")
            model.forward = loss_forward(anatomy, head_loss(anatomy, method, group=group), sequence)

            def restore() -> None:
                if before is None:
                    del model.forward
                else:
                    model.forward = before

            return Part(sentence=f"{anatomy.head_name} and loss: no logits where labels are given", restore=restore)
        case _:
            assert_never(method)
