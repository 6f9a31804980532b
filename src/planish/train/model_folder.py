"""A model as the folder that `from_pretrained` opens: written layer by layer, in transformers' published names."""

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from planish.models.adapter import ADAPTER_WEIGHTS, adapter_of, published_name
from planish.models.child_files import is_child, save_config
from planish.peaks.optim.int8_weight import Int8Weight
from planish.train.behind import Files, at_once
from planish.train.collect import layer_of
from planish.train.spread import local, reduced
from planish.train.tensor_files import in_file_order, write_safetensors


class Groups(Protocol):
    """Weights by name, in groups that are published on their own."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield one after the other."""
        ...


def write_model(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    leads: bool = True,
    groups: Groups | None = None,
    files: Files = at_once,
) -> dict[str, str]:
    """Write config, weights and tokenizer; return where each weight is that is stored as it lies in memory.

    `save_pretrained` writes the same tensors, but where it converts weights (it splits fused experts) it copies those
    of all layers first: 58 % of a small Qwen3-MoE. Here each layer is one file.

    Memory: the converted weights of one layer; nothing where there are none. Sharded weights: one tensor whole, or
        those of one layer where they are converted.
    Communication: one collective per sharded weight.

    Args:
        folder: Exists.
        model: Its weights may be sharded; then all ranks take part.
        tokenizer: Saved beside it.
        leads: This rank writes; the others only bring their shards.
        groups: Of the model's weights, where this rank does not hold all of them.
        files: Opens the files of weights.

    Returns:
        For each weight that was not converted, its name in memory and its name in the files.

    Raises:
        OSError: The disk refuses.
    """
    if leads:
        adapter = adapter_of(model)
        config = _config_as_saved(model)
        save_config(config, folder) if is_child(config) else config.save_pretrained(folder)
        if adapter is not None:
            adapter.save_pretrained(str(folder))
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
        if tokenizer is not None:
            _write_tokenizer(folder, tokenizer)
    return _write(folder, model, groups, files if leads else None)


def rehearse_write(model: PreTrainedModel, groups: Groups | None = None) -> None:
    """Make every tensor that `write_model` makes, and write nothing."""
    _write(Path(), model, groups, None)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return parameters and persistent buffers as they lie in memory, an int8 weight as its parts.

    Tied ones are there once, under the name that transformers keeps; of a model with an adapter, the adapter's alone.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in _weights(model).items():
        if isinstance(tensor, Int8Weight):
            weights |= {f"{name}.{part}": getattr(tensor, part) for part in tensor.__tensor_flatten__()[0]}
        else:
            weights[name] = tensor
    return weights


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    if adapter_of(model) is not None:  # the frozen weights are where they came from
        return {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    ignored = model._keys_to_ignore_on_save or ()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    tied_first = sorted(state, key=lambda name: name not in model.all_tied_weights_keys)
    kept = {_memory(state[name]): name for name in tied_first}
    return {name: tensor for name, tensor in state.items() if not tensor.numel() or kept[_memory(tensor)] == name}


def _write(folder: Path, model: PreTrainedModel, groups: Groups | None, files: Files | None) -> dict[str, str]:
    if adapter_of(model) is not None:
        return _write_adapter(folder, [weights_of(model)] if groups is None else groups, files)
    return _write_weights(folder, model, weight_groups(model) if groups is None else groups, files)


def _write_adapter(folder: Path, groups: Groups, files: Files | None) -> dict[str, str]:
    weights = {name: tensor for group in groups for name, tensor in group.items()}
    stored = {name: published_name(name) for name in weights}
    saved = {stored[name]: tensor for name, tensor in weights.items()}
    _write_file(folder / ADAPTER_WEIGHTS, saved, files)
    return stored


def _write_file(path: Path, tensors: Mapping[str, Tensor], files: Files | None) -> None:
    """Write `tensors` where this rank has files; elsewhere bring their shards, in the same order."""
    if files is not None:
        write_safetensors(path, tensors, {"format": "pt"}, files=files)
        return
    for name in in_file_order(tensors):
        reduced(tensors[name])


def config_difference(model: PreTrainedModel, folder: Path) -> str | None:
    """Return how the config of the model in `folder` differs from `model`'s, or None where it does not."""
    there = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    here = json.loads(_config_as_saved(model).to_json_string())
    names = [name for name in sorted(there | here) if there.get(name) != here.get(name)]
    names = [name for name in names if name != "transformers_version"]
    if not names:
        return None
    name = names[0]
    return f"`{name}` of its config is {there.get(name)!r} in the checkpoint and {here.get(name)!r} here"


def _config_as_saved(model: PreTrainedModel) -> Any:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(model.dtype).removeprefix("torch.")
    return config


def weight_groups(model: PreTrainedModel) -> list[dict[str, Tensor]]:
    """Return the weights in groups that are published on their own: all of them if none is converted, else by layer."""
    weights = _weights(model)
    shapes = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in weights.items()}
    wide = not any(isinstance(each, Int8Weight) for each in weights.values())
    if wide and revert_weight_conversion(model, dict(shapes)).keys() == shapes.keys():
        return [weights]
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        groups.setdefault(layer_of(name), {})[name] = tensor
    return list(groups.values())


def published(model: PreTrainedModel, group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a group's weights in the names and form that transformers publishes; converted ones are new tensors."""
    wide = {name: each.dequantize() if isinstance(each, Int8Weight) else each for name, each in group.items()}
    return revert_weight_conversion(model, wide)


def _write_weights(folder: Path, model: PreTrainedModel, groups: Groups, files: Files | None) -> dict[str, str]:
    total_bytes = 0
    stored: dict[str, str] = {}
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        several = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        path = folder / f"model{several}.safetensors"
        total_bytes += sum(each.nbytes for each in group.values())
        memory_of, names = _write_group(path, model, group, files, whole=len(groups) > 1)
        weight_map |= dict.fromkeys(memory_of.values(), path.name)
        stored |= {name: memory_of[memory] for name, memory in names.items() if memory in memory_of}
    if files is not None and len(groups) > 1:
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": weight_map,
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return stored


_Memory = tuple[Any, ...]


def _write_group(
    path: Path, model: PreTrainedModel, group: Mapping[str, Tensor], files: Files | None, *, whole: bool
) -> tuple[dict[_Memory, str], dict[str, _Memory]]:
    """Write `group` in its published form; return what name lies where, saved and in memory. No tensor outlives this.

    Args:
        path: The file.
        model: Knows the published form.
        group: Weights by name.
        files: Opens what is written; None: only bring shards.
        whole: Bring the shards of the whole group together first, since some are converted.
    """
    if whole:
        group = {name: reduced(tensor) for name, tensor in group.items()}
    saved = published(model, group)
    _write_file(path, saved, files)
    memory_of = {_memory(tensor): name for name, tensor in saved.items()}
    return memory_of, {name: _memory(tensor) for name, tensor in group.items()}


def _memory(tensor: Tensor) -> _Memory:
    """Return what two names of one tensor share."""
    tensor = local(tensor)
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # tokenizers raises what the disk refuses as a bare Exception
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code.group(1)), os.strerror(int(code.group(1)))) from error
