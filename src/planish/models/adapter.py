"""LoRA adapters by peft, put into a model in place: its class, its seams and its names for weights stay."""

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import PreTrainedModel

from planish.errors import UsageError
from planish.sections import AdapterSection

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NAME = "default"


def add_adapter(model: PreTrainedModel, section: AdapterSection, *, base: str, seed: int | None) -> None:
    """Freeze `model` and give its targets an adapter in the model's dtype, which changes nothing yet.

    Args:
        model: Its linear layers are replaced.
        section: Rank, scale, dropout and targets.
        base: Where the frozen weights are, for whoever opens the adapter alone.
        seed: Of the first matrices, the second ones are zero; None leaves both empty, for sketches and dry runs.

    Raises:
        UsageError: No peft, or targets that the model does not have.
    """
    with _peft() as peft:
        if seed is not None:
            torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=section.rank,
            lora_alpha=section.alpha,
            lora_dropout=section.dropout,
            target_modules=list(section.targets) or "all-linear",
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        try:
            with unset_fake_temporarily():  # peft moves what it makes, which fake tensors do not take
                peft.get_peft_model(model, config, autocast_adapter_dtype=False, low_cpu_mem_usage=seed is None)
        except UserWarning as error:
            raise UsageError(
                f"`model.adapter.targets` {list(section.targets)} include a weight that is the embedding and the head, "
                "and merging the adapter would change both; leave it out."
            ) from error
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"`model.adapter.targets` {list(section.targets)} do not fit the model: {reason}"
            ) from error
    if seed is None:
        _allocate(model)


def _allocate(model: PreTrainedModel) -> None:
    """Give the adapter's weights, which peft has left on the meta device, memory where new tensors go."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.is_meta:
                empty = torch.empty(param.shape, dtype=model.dtype)
                setattr(module, name, torch.nn.Parameter(empty, requires_grad=param.requires_grad))


def adapter_of(model: PreTrainedModel) -> "LoraConfig | None":
    """Return the config of the adapter that `model` trains, or None where it has none."""
    found: Mapping[str, Any] = vars(model).get("peft_config", {})
    return found.get(_NAME)


def published_name(name: str) -> str:
    """Return the name that peft's files have for an adapter weight."""
    return f"base_model.model.{name.replace(f'.{_NAME}.', '.')}"


def base_of(folder: Path) -> str | None:
    """Return where the frozen weights of the adapter in `folder` are; None where it holds no adapter."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return None
    return json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]


def merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return `model` with the adapter in `folder` added into its weights."""
    with _peft() as peft:
        return peft.PeftModel.from_pretrained(model, folder).merge_and_unload()


@contextmanager
def _peft() -> Iterator[Any]:
    try:
        import peft
    except ImportError as error:
        raise UsageError("adapters need peft; install it with `pip install 'planish[adapter]'`.") from error
    with warnings.catch_warnings():
        # "all-linear" brings patterns for experts that are no linear layers; peft asks a model by a deprecated name.
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys", category=RuntimeWarning)
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        warnings.filterwarnings("error", message="Model has `tie_word_embeddings=True`", category=UserWarning)
        yield peft
