"""`planish generate MODEL`: a prompt in, the model's continuation out."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from planish.cli.options import parse_plain
from planish.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Continue a prompt with a model."""

    model: Annotated[str, tyro.conf.Positional]
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
    if options.temperature < 0:
        raise UsageError(f"`--temperature` must be 0 or more, got {options.temperature}.")
    sys.stdout.write(generate(options) + "\n")
    return 0


def generate(options: Options) -> str:
    """Return the continuation, without the prompt."""
    import torch
    import transformers

    from planish.models.load import load_model, load_tokenizer
    from planish.runfile import ModelSection

    transformers.utils.logging.disable_progress_bar()
    section = ModelSection(from_=model_source(options.model), dtype=options.dtype)
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
    with torch.no_grad():
        ids = model.generate(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            max_new_tokens=options.max_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **drawn,
        )
    return tokenizer.decode(ids[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)


def model_source(name: str) -> str:
    """Return the model folder that `name` means: a run folder stands for its latest checkpoint."""
    latest = Path(name) / "latest"
    if latest.is_file():
        return str(Path(name) / "checkpoints" / latest.read_text(encoding="utf-8").strip())
    return name
