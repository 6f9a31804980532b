"""`planish data stats TEXT...`: what a corpus holds."""

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from planish.cli.options import count, parse_plain
from planish.errors import UsageError
from planish.sections import ModelSection
from planish.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show what a corpus holds: documents, bytes, tokens, lengths."""

    what: Annotated[Literal["stats"], tyro.conf.Positional, tyro.conf.arg(metavar="WHAT")]
    """What to show."""
    text: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT")]
    """Files, folders or built-in corpora ("builtin:english", "builtin:python")."""
    tokenizer: str = "smollm2-135m"
    """A folder or built-in model to take the tokenizer from."""
    context: str = "2048"
    """Row length to count rows for, such as 4096 or 4K."""
    max_documents: int | None = None
    """Look at this many documents in a shuffled order instead of all."""


def main(words: list[str]) -> int:
    """Run the verb."""
    options = parse_plain(Options, words, verb="data")
    if not options.text:
        raise UsageError("`planish data stats` needs a text to look at, for example builtin:english.")
    context = count(options.context, name="--context")
    if options.max_documents is not None and options.max_documents < 1:
        raise UsageError(f"`--max-documents` must be 1 or more, got {options.max_documents}.")

    from planish.data.stats import QUANTILES, describe
    from planish.models.load import load_tokenizer

    tokenizer = load_tokenizer(ModelSection(from_=options.tokenizer))
    stats = describe(options.text, tokenizer, context=context, max_documents=options.max_documents)
    sample = "" if stats.complete else " (a shuffled sample)"
    empty = f", {stats.num_empty_files} empty ones left out" if stats.num_empty_files else ""
    lengths = "  ".join(f"{quantile:.0%} {length:,}" for quantile, length in zip(QUANTILES, stats.lengths, strict=True))
    rows = [
        ("files", f"{stats.num_files:,} of {format_bytes(stats.files_bytes)} together{empty}"),
        ("documents", f"{stats.num_documents:,}{sample}, {stats.num_empty_documents:,} without a token"),
        ("tokens", f"{stats.num_tokens:,}, {stats.bytes_per_token:.2f} bytes each"),
        ("lengths", lengths),
        (f"rows of {context:,}", f"{stats.num_windows:,} packed; {stats.num_long_documents:,} documents are longer"),
    ]
    sys.stdout.write("".join(f"{name:<16}{value}\n" for name, value in rows))
    return 0
