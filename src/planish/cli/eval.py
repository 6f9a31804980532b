"""`planish eval MODEL TEXT...`: loss and bits per byte of a model on held-out text."""

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro

from planish.cli.generate import model_source
from planish.cli.options import count, parse_plain, size_bytes
from planish.errors import UsageError
from planish.methods import Plan
from planish.sections import ModelSection
from planish.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure a model on held-out text."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A transformers folder, a run folder (its latest checkpoint), or a built-in model ("smollm2-135m")."""
    text: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """Files, folders or built-in corpora ("builtin:english")."""
    context: str = "2048"
    """Tokens in one row, such as 4096 or 4K."""
    max_tokens: str = "64K"
    """Stop after this many tokens."""
    memory: str | None = None
    """Budget such as "2GiB"; exceeding it ends with exit code 4."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of weights and products."""
    json: bool = False
    """Print one JSON object and nothing else."""


def main(words: list[str]) -> int:
    """Run the verb."""
    options = parse_plain(Options, words, verb="eval")
    if not options.text:
        raise UsageError("`planish eval` needs a text to measure on, for example builtin:english.")
    context = count(options.context, name="--context")
    max_tokens = count(options.max_tokens, name="--max-tokens")
    budget_bytes = size_bytes(options.memory, name="--memory") if options.memory else None

    from planish.data.feed import eval_batches
    from planish.memory.ledger import Ledger
    from planish.models.load import load_model, load_tokenizer
    from planish.train.engine import build_engine
    from planish.train.evaluate import evaluate
    from planish.train.facts import MeasuredFacts

    section = ModelSection(from_=model_source(options.model), dtype=options.dtype)
    tokenizer = load_tokenizer(section)
    with ExitStack() as scope, Ledger(budget_bytes=budget_bytes) as ledger:
        engine = build_engine(
            lambda: load_model(section, context=context, tokenizer=tokenizer, seed=0),
            Plan(),
            tokens=context,
            ledger=ledger,
            facts=MeasuredFacts(),
            scope=scope,
        )
        batches = eval_batches(options.text, tokenizer=tokenizer, context=context, rows=1, max_tokens=max_tokens)
        report = evaluate(engine, batches)
        peak_bytes = max(ledger.peak_bytes.values())
    if options.json:
        sys.stdout.write(json.dumps({**asdict(report), "peak_bytes": peak_bytes}) + "\n")
    else:
        per_byte = "" if report.bits_per_byte is None else f", {report.bits_per_byte:.4f} bits per byte"
        sys.stdout.write(
            f"loss {report.loss:.4f} nats per token{per_byte} "
            f"over {report.num_valid:,} tokens; peak {format_bytes(peak_bytes)}\n"
        )
    return 0
