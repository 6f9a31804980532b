"""Model section in, transformers model and tokenizer out, with the disagreements that would surface later refused."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from planish.decode import nearest
from planish.errors import UsageError
from planish.models.adapter import add_adapter, base_of, merge_adapter
from planish.models.builtin import cache_folder, convert_gguf, made_whole, model_folder
from planish.models.child import register
from planish.models.rope import replace_rope
from planish.models.upcycle import upcycle, upcycled_config
from planish.sections import ModelSection

register()  # compressed children open as any model does

_TORCH_DTYPE = {"bf16": torch.bfloat16, "bf16-pure": torch.bfloat16, "fp32": torch.float32}


def run_device() -> torch.device:
    """Return where a run's model lives: the CUDA device where there is one, the CPU elsewhere."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(section: ModelSection) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the model section names.

    Raises:
        UsageError: No tokenizer there, or one that is not a fast tokenizer.
    """
    folder = _tokenizer_folder(section)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"no tokenizer in {folder}; name a folder that has one as `model.tokenizer` ({_first_line(error)})."
        ) from error
    if not tokenizer.is_fast:
        raise UsageError(f"the tokenizer in {folder} has no tokenizer.json; `model.tokenizer` needs a fast tokenizer.")
    return tokenizer


def load_config(section: ModelSection, *, context: int) -> PretrainedConfig:
    """Return the model's config with positions for `context` tokens.

    Raises:
        UsageError: A config that transformers does not know, or a context beyond the model's positions while neither
            `model.rope` nor `model.extend_positions` says what to do.
    """
    source = section.config if section.config is not None else _weights_folder(section)
    if not Path(source).exists():
        raise UsageError(f"`model.config` file {source} does not exist.")
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{source} is not a config that transformers can open: {_first_line(error)}") from error
    return _with_positions(config, section, context)


def load_model(
    section: ModelSection, *, context: int, tokenizer: PreTrainedTokenizerBase, seed: int, on_host: bool = False
) -> PreTrainedModel:
    """Return the causal LM in the run's dtype, on the run's device, the tokenizer checked against its vocabulary.

    A folder that holds an adapter is its base model with the adapter added in.

    Args:
        section: Which model.
        context: Tokens in one row.
        tokenizer: Its ids must be within the vocabulary.
        seed: Of weights that are drawn.
        on_host: It stays in host memory.

    Raises:
        UsageError: As `load_config`; weights that cannot be read; a tokenizer with ids beyond the vocabulary.
    """
    config = load_config(section, context=context)
    check_vocabulary(config, tokenizer)
    device = torch.device("cpu") if on_host else run_device()
    if section.config is not None:
        torch.manual_seed(seed)
        return draw_model(config, section).to(device)
    folder = _weights_folder(section)
    base = base_of(folder)
    if base is not None:
        frozen = replace(section, from_=base, adapter=None)
        model = load_model(frozen, context=context, tokenizer=tokenizer, seed=seed, on_host=on_host)
        return merge_adapter(model, folder)
    dtype = _TORCH_DTYPE[section.dtype]
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"the weights in {folder} cannot be loaded: {_first_line(error)}") from error
    _check_loaded(folder, report)
    if section.moe is not None:
        model = upcycle(model, section.moe, seed=seed)
    if section.adapter is not None:
        add_adapter(model, section.adapter, base=str(folder.resolve()), seed=seed)
    _freeze(model, section.freeze)
    return model.to(device)


def draw_model(config: PretrainedConfig, section: ModelSection) -> PreTrainedModel:
    """Return a model of `config`, or of the mixture it becomes, in the run's dtype with weights drawn at random."""
    if section.moe is not None:
        config = upcycled_config(config, section.moe)
    model = AutoModelForCausalLM.from_config(config, dtype=_TORCH_DTYPE[section.dtype])
    if section.adapter is not None:
        add_adapter(model, section.adapter, base=model.name_or_path, seed=None)
    _freeze(model, section.freeze)
    return model


def _freeze(model: PreTrainedModel, parts: tuple[str, ...]) -> None:
    """Let weights whose names have one of `parts` between their dots take no gradient."""
    for part in parts:
        frozen = [each for name, each in model.named_parameters() if part in name.split(".")]
        if not frozen:
            known = sorted({piece for name, _ in model.named_parameters() for piece in name.split(".")[:-1]})
            raise UsageError(f"`model.freeze` = {part!r} is in no weight's name; {nearest(part, known)}")
        for each in frozen:
            each.requires_grad_(requires_grad=False)
    if parts and not any(each.requires_grad for each in model.parameters()):
        raise UsageError("`model.freeze` leaves nothing to train; name fewer parts.")


def _check_loaded(folder: Path, report: Mapping[str, Any]) -> None:
    """Refuse weights that transformers would draw at random: those that are missing, or of another shape."""
    missing = [f"`{name}` is missing" for name in sorted(report["missing_keys"])]
    shapes = sorted((name, list(there), list(here)) for name, there, here in report["mismatched_keys"])
    other = [f"`{name}` is {there}, the config asks for {here}" for name, there, here in shapes]
    if wrong := [*missing, *other]:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UsageError(
            f"the weights in {folder} are not those of its config: {wrong[0]}{more}; save the model again."
        )


def sketch_model(section: ModelSection, *, context: int) -> PreTrainedModel:
    """Return the model of `section` without weights, on the meta device: a rank's place for its shards."""
    with torch.device("meta"):
        return draw_model(load_config(section, context=context), section)


def check_vocabulary(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose ids the model has no embedding for."""
    size = text_config(config).vocab_size
    largest = max(tokenizer.get_vocab().values())
    if largest >= size:
        raise UsageError(
            f"the tokenizer has ids up to {largest}, the model's vocabulary ends at {size - 1}; "
            "name the model's own tokenizer as `model.tokenizer`."
        )


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return the part of `config` that describes the language model."""
    return config.get_text_config(decoder=True)


def _with_positions(config: PretrainedConfig, section: ModelSection, context: int) -> PretrainedConfig:
    text = text_config(config)
    positions = reach = text.max_position_embeddings
    if section.rope is not None:
        reach = replace_rope(text, section.rope)
    if context > reach and not section.extend_positions:
        remedy = (
            "give rotary parameters as `model.rope`" if section.rope is None else "raise the factor of `model.rope`"
        )
        raise UsageError(
            f"a context of {context} tokens is longer than the model's {reach:g} positions; shorten it, "
            f"{remedy}, or set `model.extend_positions = true`."
        )
    # "dynamic" rotary parameters read the limit as that of the model's training.
    if context > positions and (text.rope_parameters or {}).get("rope_type") != "dynamic":
        text.max_position_embeddings = context
    return config


def _weights_folder(section: ModelSection) -> Path:
    if section.gguf is not None:
        return _converted(section.gguf)
    return model_folder(section.from_ or "")


def _tokenizer_folder(section: ModelSection) -> Path:
    if section.tokenizer is not None:
        return model_folder(section.tokenizer)
    if section.config is not None:
        return section.config.parent
    return _weights_folder(section)


def _converted(gguf: Path) -> Path:
    """Return the cached transformers folder of a GGUF file; loading GGUF each time would take 20 s."""
    if not gguf.is_file():
        raise UsageError(f"`model.gguf` file {gguf} does not exist.")
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = cache_folder() / f"gguf-{digest}"
    if not (target / "config.json").is_file():
        with made_whole(target) as folder:
            convert_gguf(gguf, folder)
    return target


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
