"""`planish generate MODEL`: a prompt in, the model's continuation out."""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from planish.cli.options import parse_plain
from planish.errors import NotFinite, UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Continue a prompt with a model."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A transformers folder, a run folder (its latest checkpoint), or a built-in model ("smollm2-135m")."""
    prompt: str
    """What to continue."""
    max_tokens: int = 64
    """Tokens to add at most."""
    temperature: float = 0.0
    """0 always takes the likeliest token; above 0 draws."""
    seed: int = 0
    """Of the draws."""
    chat: bool = False
    """Put the prompt through the model's chat template as a user's message."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of the weights."""


def main(words: list[str]) -> int:
    """Run the verb."""
    options = parse_plain(Options, words, verb="generate")
    if options.max_tokens < 1:
        raise UsageError(f"`--max-tokens` must be 1 or more, got {options.max_tokens}.")
    if not 0 <= options.temperature < math.inf:
        raise UsageError(f"`--temperature` must be 0 or more and finite, got {options.temperature}; try 0.7.")
    if not 0 <= options.seed < 2**63:
        raise UsageError(f"`--seed` must be in 0 to 2^63 - 1, got {options.seed}.")
    sys.stdout.write(generate(options) + "\n")
    return 0


def generate(options: Options) -> str:
    """Return the continuation, without the prompt."""
    import torch
    from transformers import LogitsProcessorList

    from planish.models.load import load_model, load_tokenizer
    from planish.sections import ModelSection

    source = model_source(options.model)
    section = ModelSection(from_=source, dtype=options.dtype)
    tokenizer = load_tokenizer(section)
    model = load_model(section, context=1, tokenizer=tokenizer, seed=0).eval()
    if options.chat:
        if tokenizer.chat_template is None:
            raise UsageError(f"{options.model} has no chat template; leave out `--chat`.")
        messages = [{"role": "user", "content": options.prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(options.prompt, return_tensors="pt")
    if encoded["input_ids"].numel() == 0:
        raise UsageError("`--prompt` holds no token; write at least one character.")
    torch.manual_seed(options.seed)
    drawn = {"do_sample": True, "temperature": options.temperature} if options.temperature else {"do_sample": False}

    def refuse_nan(_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.isnan().any():
            raise NotFinite(
                f"the model in {source} answers with NaN; its weights are broken, take an earlier checkpoint."
            )
        return scores

    with torch.no_grad():
        ids = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=options.max_tokens,
            logits_processor=LogitsProcessorList([refuse_nan]),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **drawn,
        )
    return tokenizer.decode(ids[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)


def model_source(name: str) -> str:
    """Return the model folder that `name` means: a run folder stands for its newest intact checkpoint.

    Raises:
        UsageError: The run has saved none yet.
        CheckpointCorrupt: There are some, and none is intact.
    """
    folder = Path(name) / "checkpoints"
    if not folder.is_dir():
        return name

    from planish.train.checkpoint import newest

    found = newest(folder, checksums=False)
    if found is None:
        raise UsageError(f"run folder {name} holds no checkpoint yet; wait for its first save, or train on.")
    for sentence in found.skipped:
        sys.stderr.write(f"planish: {sentence}\n")
    return str(found.path)
