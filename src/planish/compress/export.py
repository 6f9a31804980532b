"""A child's folder in, the same function in forms that others open out: plain transformers, and engines with DeciLM."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from planish.compress import decilm
from planish.compress.blocks import architecture_of, expert_keys
from planish.compress.library import stand_in
from planish.compress.realise import Lazy, write_lazily
from planish.compress.space import (
    Architecture,
    Choice,
    KeepExperts,
    KeepHeads,
    LinearAttention,
    LinearFfn,
    NoAttention,
    NoFfn,
    SlidingWindow,
    Width,
    attends,
)
from planish.errors import UsageError, WorldFailed
from planish.models.child import MODEL_TYPE, parent_config

_BESIDE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_ENGINE_MULTIPLE = 256


class ChildFolder:
    """A child as `write_child` or transformers saved it, read tensor by tensor.

    Args:
        folder: Its place.

    Raises:
        UsageError: No child there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
            files = sorted(folder.glob("*.safetensors"))
            self._places = {name: path for path in files for name in _names(path)}
        except (OSError, ValueError, SafetensorError) as error:
            raise UsageError(f"{folder} holds no model that can be read ({error}).") from error
        if self.config.model_type != MODEL_TYPE or not files:
            raise UsageError(f"{folder} holds no compressed child; name a folder that `planish compress` wrote.")

    @property
    def architecture(self) -> Architecture:
        """What its layers are."""
        return architecture_of(self.config)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """Return the names of its tensors."""
        return sorted(self._places)

    def shape(self, name: str) -> Tensor:
        """Return a tensor without bytes of the shape and dtype of `name`."""
        with safe_open(self._places[name], framework="pt") as file:
            return stand_in(file.get_slice(name))

    def read(self, name: str) -> Tensor:
        """Return a tensor."""
        with safe_open(self._places[name], framework="pt") as file:
            return file.get_tensor(name)

    def lazy(self, name: str) -> Lazy:
        """Return a tensor that is read when it is written."""
        return Lazy(lambda: self.read(name), self.shape(name))


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def export_dense(child: Path, folder: Path) -> None:
    """Write a child as a model of its parent's class with one size for all layers, which transformers opens alone.

    Channels that are not there become zeros, heads of keys and values that are shared are repeated, and sub-blocks that
    are not there are zeros. It computes what the child does, in the time of its largest sizes.

    Memory:        one tensor.
    Exactness:     bitwise where products of longer rows add in the same order, to rounding elsewhere.

    Args:
        child: A child's folder.
        folder: Where to.

    Raises:
        UsageError: A layer with one matrix, or another window, in the place of a sub-block, or layers with different
            numbers of experts: no plain class has those.
        WorldFailed: The disk refuses.
    """
    source = ChildFolder(child)
    config = parent_config(source.config)
    choices = source.architecture.layers
    for index, choice in enumerate(choices):
        _refuse_dense(index, choice, getattr(config, "sliding_window", None))
    widths = [each.ffn.width for each in choices if isinstance(each.ffn, Width)]
    mixtures = [each.ffn for each in choices if isinstance(each.ffn, KeepExperts)]
    _refuse_uneven(mixtures)
    heads = [each.attention.kv_heads for each in choices if isinstance(each.attention, KeepHeads | SlidingWindow)]
    config.num_key_value_heads = math.lcm(*heads)
    if widths:
        config.intermediate_size = max(widths)
    if mixtures:
        count, width = expert_keys(config)
        config.update({count: mixtures[0].experts, width: max(each.width for each in mixtures)})
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=source.config.dtype)
    config.architectures = [type(plain).__name__]
    config.dtype = source.config.dtype
    tied = set(plain.state_dict()) - {name for name, _ in plain.named_parameters()}
    tensors = {
        name: _dense(source, name, each, _head_dim(config))
        for name, each in plain.state_dict().items()
        if name not in tied
    }
    _write(source, folder, config.to_dict() | {"model_type": config.model_type}, tensors)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _refuse_dense(index: int, choice: Choice, window: int | None) -> None:
    attention, ffn = choice.attention, choice.ffn
    if isinstance(attention, LinearAttention) or isinstance(ffn, LinearFfn):
        raise UsageError(
            f"layer {index} is {choice.label}: no plain class has one matrix in the place of a sub-block; search "
            "without `linear`, or use the native form."
        )
    if isinstance(attention, SlidingWindow) and attention.window != window:
        raise UsageError(
            f"layer {index} is {choice.label}: the parent's class has no such window; search without `windows`, or use "
            "the native form."
        )


def _refuse_uneven(mixtures: Sequence[KeepExperts]) -> None:
    counts = sorted({each.experts for each in mixtures})
    if len(counts) > 1:
        raise UsageError(
            f"layers have {' and '.join(map(str, counts))} experts: plain classes have as many in every layer, and a "
            "router cannot be kept from one that is padding; search with one of `experts`, or use the native form."
        )


def _dense(source: ChildFolder, name: str, like: Tensor, head_dim: int) -> Lazy:
    """Return tensor `name` of the plain model."""
    if name not in source:
        one = name.endswith("norm.weight")
        return Lazy(lambda: torch.full(like.shape, float(one), dtype=like.dtype), like)
    if source.shape(name).shape == like.shape:
        return source.lazy(name)
    return Lazy(lambda: _fitted(source.read(name), like, name, head_dim), like)


def _fitted(tensor: Tensor, like: Tensor, name: str, head_dim: int) -> Tensor:
    if ".self_attn.k_" in name or ".self_attn.v_" in name:
        times = like.shape[0] // tensor.shape[0]
        return tensor.unflatten(0, (-1, head_dim)).repeat_interleave(times, 0).flatten(0, 1)
    halves = name.endswith("experts.gate_up_proj")  # channels of the gate, then as many that it lets through
    if halves:
        tensor = tensor.unflatten(1, (2, -1))
    found = torch.zeros(like.unflatten(1, (2, -1)).shape if halves else like.shape, dtype=tensor.dtype)
    found[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return found.flatten(1, 2) if halves else found


def export_decilm(child: Path, folder: Path) -> None:
    """Write a child as a DeciLM ("nemotron-nas") model: vLLM and TensorRT-LLM run its layers in their own sizes.

    Widths are written as `ffn_mult` where engines' rounding to multiples of 256 gives them back, else as
    `intermediate_size`, which vLLM takes and llama.cpp's converter does not. A layer that attends and has no network
    gets one of 256 zero channels, since llama.cpp loses the attention of layers without one.

    Memory:        one tensor.

    Args:
        child: A child's folder, of a Llama.
        folder: Where to.

    Raises:
        UsageError: Another parent than a Llama, one matrix in the place of a sub-block, a window, or a first layer with
            a network and no attention: the engines cannot run those.
        WorldFailed: The disk refuses.
    """
    source = ChildFolder(child)
    config = parent_config(source.config)
    choices = source.architecture.layers
    if config.model_type != "llama":
        raise UsageError(f"DeciLM is a Llama in its engines, the parent is {config.model_type}; use the native form.")
    for index, choice in enumerate(choices):
        _refuse_decilm(index, choice)
    first = next(each for each in choices if not isinstance(each.ffn, NoFfn) or attends(each.attention))
    if not attends(first.attention):
        raise UsageError(
            f"the first layer that does anything is {first.label}: vLLM's DeciLM needs attention there; search with "
            "attention kept in layer 0."
        )
    exact = all(not isinstance(each.ffn, Width) or each.ffn.width % _ENGINE_MULTIPLE == 0 for each in choices)
    tree = config.to_dict() | {
        "model_type": decilm.DeciLMConfig.model_type,
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": f"{Path(decilm.__file__).stem}.{decilm.DeciLMConfig.__name__}"},
        "block_configs": [
            {
                "attention": _decilm_attention(each, config.num_attention_heads),
                "ffn": _decilm_ffn(each, config.hidden_size, exact=exact),
            }
            for each in choices
        ],
    }
    tensors = {name: source.lazy(name) for name in source.names()}
    for index, choice in enumerate(choices):
        if attends(choice.attention) and isinstance(choice.ffn, NoFfn):
            tensors |= _silent_network(f"model.layers.{index}", config.hidden_size, source.config.dtype)
    _write(source, folder, tree, tensors)
    try:
        shutil.copyfile(decilm.__file__, folder / Path(decilm.__file__).name)
    except OSError as error:
        raise WorldFailed(f"{folder} cannot be written: {error.strerror or error}.") from error


def _refuse_decilm(index: int, choice: Choice) -> None:
    if isinstance(choice.attention, LinearAttention | SlidingWindow) or isinstance(choice.ffn, LinearFfn | KeepExperts):
        raise UsageError(
            f"layer {index} is {choice.label}: DeciLM's engines run heads, widths and nothing else; search without "
            "`linear` and `windows`, or use the native form."
        )


def _decilm_attention(choice: Choice, heads: int) -> dict[str, Any]:
    nothing = isinstance(choice.attention, NoAttention)
    group = heads // choice.attention.kv_heads if isinstance(choice.attention, KeepHeads) else None
    return {"n_heads_in_group": group, "no_op": nothing, "replace_with_linear": False}


def _decilm_ffn(choice: Choice, hidden_size: int, *, exact: bool) -> dict[str, Any]:
    """Return a layer's network; engines make int(2 * ffn_mult * D / 3) of it, rounded up to a multiple of 256."""
    width = choice.ffn.width if isinstance(choice.ffn, Width) else 0
    if not width and attends(choice.attention):
        width = _ENGINE_MULTIPLE
    if not width:
        return {"ffn_mult": None, "no_op": True, "replace_with_linear": False}
    size = {"ffn_mult": 3 * width / (2 * hidden_size)} if exact else {"intermediate_size": width}
    return {**size, "no_op": False, "replace_with_linear": False}


def _silent_network(layer: str, hidden_size: int, dtype: torch.dtype) -> dict[str, Lazy]:
    shapes = {
        f"{layer}.mlp.gate_proj.weight": (_ENGINE_MULTIPLE, hidden_size),
        f"{layer}.mlp.up_proj.weight": (_ENGINE_MULTIPLE, hidden_size),
        f"{layer}.mlp.down_proj.weight": (hidden_size, _ENGINE_MULTIPLE),
    }
    found = {name: _constant(shape, 0.0, dtype) for name, shape in shapes.items()}
    return found | {f"{layer}.post_attention_layernorm.weight": _constant((hidden_size,), 1.0, dtype)}


def _constant(shape: tuple[int, ...], value: float, dtype: torch.dtype) -> Lazy:
    return Lazy(lambda: torch.full(shape, value, dtype=dtype), torch.empty(shape, dtype=dtype, device="meta"))


def copy_beside(source: Path, folder: Path) -> None:
    """Copy tokenizer and generation settings, where there are any.

    Raises:
        OSError: The disk refuses.
    """
    for name in _BESIDE:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _write(source: ChildFolder, folder: Path, tree: dict[str, Any], tensors: dict[str, Lazy]) -> None:
    tree["dtype"] = str(source.config.dtype).removeprefix("torch.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
        copy_beside(source.folder, folder)
    except OSError as error:
        raise WorldFailed(f"{folder} cannot be written: {error.strerror or error}.") from error
    write_lazily(folder / "model.safetensors", tensors)
