"""`planish compress MODEL`: a smaller child within measured limits; `verify CHILD`: measured again; `export CHILD`."""

import json
import sys
import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from planish.cli.generate import model_source
from planish.cli.lessons import read_lessons
from planish.cli.options import count, parse, parse_plain, size_bytes
from planish.cli.say import say
from planish.decode import nearest
from planish.errors import UsageError, VerificationFailed


@dataclass(frozen=True, kw_only=True)
class Options:
    """Make a smaller child of a trained model that keeps to limits of latency, memory or size, measured here.

    Every stage (library of blocks, latency, scores, search, lessons, judgement) is kept in `--out`, and goes on where
    it stopped. With `--distil-tokens` the child then learns from its parent; `--train`, `--distil`, `--plan` and
    `--model.freeze` say how, as in a run of `planish train`. `planish compress verify CHILD` measures a child again.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A transformers folder, a run folder, a built-in model ("smollm2-135m"), or a TOML file with these options under
    [compress] and those of the lessons in tables of their own."""
    text: tuple[str, ...] = ("builtin:english",)
    """Files, folders or built-in corpora that calibrate, score and judge; no row is read for two of them."""
    out: Path = Path("runs/child")
    """Where stages, child and report go."""
    decode: str = "1x1024"
    """Rows x tokens before the one that is decoded; "none" if only prompts are served."""
    prefill: str = "1x512"
    """Rows x tokens of a prompt; "none" if it does not matter."""
    latency: tuple[str, ...] = ()
    """Such as "0.65x" of the parent's, "decode=0.6x" or "prefill=120ms"; several at once."""
    throughput: str | None = None
    """Tokens per second in decode, all rows together."""
    child_memory: str | None = None
    """Bytes that serving holds: "0.7x" of the parent's or a size such as "300MiB"."""
    parameters: str | None = None
    """Numbers in the child: "0.7x" of the parent's or "95e6"."""
    metric: Literal["kl", "loss", "cosine", "local"] = "kl"
    """What a replaced block's harm is measured by."""
    rows: tuple[int, int, int] = (48, 16, 32)
    """Rows of text that calibrate, score and judge."""
    context: str = "512"
    """Tokens of a row."""
    every: int = 2
    """Scores count one of so many tokens."""
    joint: float = 0.02
    """Share of a layer's pairs (attention, network) that are scored together, to check that their harms add up."""
    widths: tuple[float, ...] = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
    """Parts of the feed-forward width, or of each expert's, that a layer may have."""
    experts: tuple[float, ...] = (0.75, 0.5, 0.25)
    """Parts of its experts that a layer may keep."""
    width_multiple: int = 64
    """What widths are multiples of; vLLM's DeciLM asks for 256."""
    windows: tuple[int, ...] = ()
    """Tokens of sliding windows that a layer's attention may have."""
    linear: bool = True
    """Whether one matrix may stand for attention or a network; the forms that others open have no room for it."""
    context_rounds: int = 0
    """Rounds of scores around the child that was found, each as long as the scores."""
    rounds: int = 24
    """Times that each latency is measured; the least counts."""
    anchors: int | None = None
    """Sub-blocks of each kind whose latency is measured, the others fitted to them; default: all."""
    batches: tuple[int, ...] = ()
    """Rows decoded at once that are tried in the place of `--decode`'s; the one with the least harm is served."""
    block_steps: int = 0
    """Steps of training that smaller blocks get, to do what the parent's layer does, before they are scored; those get
    none that a search by their own errors would not choose near the targets."""
    couple: bool = False
    """Train attention and network of a layer together too, where the search is likely to replace both."""
    distil_tokens: str | None = None
    """Tokens from which the whole child learns to do what its parent does, such as "1M": text of `--text` that no other
    stage reads, again and again where there is less; default: none."""
    tournament: str | None = None
    """Tokens that several candidates (by other scores, in other layers, by depth drop) share before one of them has its
    lessons: each is taught a little, the worse half dropped, and so on; such as "256K", default: none."""
    fuse: bool = False
    """Make one network of those that follow one another without attention between them (FFN Fusion): the search counts
    on it, and every child is measured and judged so. Lessons compare layers, and do not go with it."""
    baselines: bool = False
    """Also assemble, measure and judge greedy, depth drop, uniform width, no-op only, most parameters, and a draw."""
    dtype: Literal["bf16", "fp32"] = "fp32"
    """Of the child's weights."""
    bf16_scores: bool = False
    """Score layers in bf16, several times as fast on processors that have its products."""
    seed: int = 0
    """Which rows calibrate, score and judge."""
    json: bool = False
    """Print one JSON object and nothing else."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Measure a child again: latency, memory, loss, KL, agreement beside what was said of it (exit 6 if worse)."""

    child: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHILD")]
    """The child's folder."""
    parent: Path | None = None
    """Its parent's folder; default: where it was."""
    rounds: int = 16
    """Times that each latency is measured."""
    json: bool = False
    """Print one JSON object and nothing else."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a child in a form that others open.

    "dense" has one size for all layers, and plain transformers opens it; "decilm" has layers of their own sizes, and
    vLLM runs it. What a form cannot say is refused. "fused" is a child again, in which networks that follow one another
    without attention between them are one (FFN Fusion): less to wait for, and something else, so measure it.
    """

    child: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHILD")]
    """The child's folder."""
    to: Literal["dense", "decilm", "fused"]
    """The form."""
    out: Path
    """Where to."""


def main(words: list[str]) -> int:
    """Run the verb."""
    if words[:1] == ["verify"]:
        return _verify(parse_plain(VerifyOptions, words[1:], verb="compress verify"))
    if words[:1] == ["export"]:
        return _export(parse_plain(ExportOptions, words[1:], verb="compress export"))
    words, tables = read_words(words)
    options, flags = parse(Options, words, verb="compress")

    import torch

    from planish.compress.job import Job
    from planish.compress.outcome import exceeded, told
    from planish.models.builtin import model_folder
    from planish.models.load import load_tokenizer
    from planish.report.child import headline, write_child_page
    from planish.sections import ModelSection

    order = read_order(options, [*tables, *flags])
    source = model_source(options.model)
    tokenizer = load_tokenizer(ModelSection(from_=source))
    note = _silence if options.json else say
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    torch.manual_seed(options.seed)
    outcome = Job(order, model_folder(source), tokenizer, dtype, note).run()
    tree = told(outcome)
    (options.out / "outcome.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    write_child_page(tree, options.out / "report.html")
    late = exceeded(outcome, tolerance=0.03)
    if options.json:
        sys.stdout.write(json.dumps(tree | {"exceeded": late}) + "\n")
    else:
        _print(tree, headline(tree), options.out)
    if late:
        raise VerificationFailed(
            f"the child is above its target: {'; '.join(late)}; the machine was not steady, or the library has nothing "
            "nearer: run again, or ask for a little less."
        )
    return 0


def read_words(words: list[str]) -> tuple[list[str], list[tuple[str, Any]]]:
    """Return `words` with a TOML file in the place of the model replaced by what it says, and its other tables.

    Raises:
        UsageError: A file that cannot be used.
    """
    if not words or not words[0].endswith(".toml"):
        return words, []
    path = Path(words[0])
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise UsageError(f"run file {path} does not exist; name a TOML file or a model.") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"run file {path} cannot be read: {error}") from error
    section, tables = dict(tree.pop("compress", {})), {name: dict(table) for name, table in tree.items()}
    model = section.pop("model", None) or tables.get("model", {}).pop("from", None)
    if not isinstance(model, str):
        raise UsageError(f'run file {path} names no model; write `from = "smollm2-135m"` under [model].')
    if not section:
        raise UsageError(f'run file {path} has no [compress] table; write for example `latency = ["0.65x"]` in it.')
    known = [*(field.name for field in fields(Options)), "memory"]
    found = []
    for name, value in section.items():
        if name.replace("-", "_") not in known:
            raise UsageError(f"`compress.{name}` of {path} is unknown; {nearest(name, known)}")
        found += _flag(name.replace("_", "-"), value)
    settings = [(f"{table}.{name}", value) for table, values in tables.items() for name, value in values.items()]
    return [model, *found, *words[1:]], settings


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    return [f"--{name}", *(map(str, value) if isinstance(value, list) else [str(value)])]


def _check(options: Options) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: Each of them.
    """
    if min(options.rows) < 2 or options.rows[0] < 4:
        raise UsageError(f"`--rows` must be at least 4 2 2, got {' '.join(map(str, options.rows))}.")
    if options.batches and (min(options.batches) < 1 or options.decode == "none"):
        raise UsageError("`--batches` must be positive, and needs a `--decode` that is served.")
    if options.anchors is not None and options.anchors < 2:
        raise UsageError(f"`--anchors` must be at least 2, got {options.anchors}; three constants are fitted to them.")
    if not 0 <= options.joint <= 1:
        raise UsageError(f"`--joint` must be between 0 and 1, got {options.joint}; it is a share of all pairs.")
    if options.block_steps < 0:
        raise UsageError(
            f"`--block-steps` must not be negative, got {options.block_steps}; 0 leaves blocks as they are."
        )
    if options.couple and not options.block_steps:
        raise UsageError("`--couple` trains pairs of blocks; say for how long with `--block-steps 60`.")
    if not 1 <= options.every < count(options.context, name="--context"):
        raise UsageError(f"`--every` must be at least 1 and below `--context`, got {options.every}.")


def read_order(options: Options, settings: list[tuple[str, Any]]) -> Any:
    """Return what `options`, and the settings of a run file, ask for.

    Raises:
        UsageError: Options that do not go together.
    """
    from planish.compress.baselines import BASELINES
    from planish.compress.order import (
        Order,
        latency_targets,
        memory_target,
        parameter_target,
        parse_scenario,
        throughput_target,
    )
    from planish.compress.space import Menu

    scenarios = [
        parse_scenario(text, phase)
        for phase, text in (("decode", options.decode), ("prefill", options.prefill))
        if text != "none"
    ]
    if not scenarios:
        raise UsageError("`--decode` and `--prefill` are both none; name what is served.")
    targets = latency_targets(options.latency, scenarios)
    targets += throughput_target(options.throughput, scenarios) if options.throughput is not None else []
    targets += memory_target(options.child_memory, scenarios) if options.child_memory is not None else []
    targets += [parameter_target(options.parameters)] if options.parameters is not None else []
    if not targets:
        raise UsageError(
            "nothing was asked of the child; give `--latency 0.65x`, `--throughput`, `--child-memory` or "
            "`--parameters`."
        )
    _check(options)
    lessons = read_lessons(
        settings,
        tokens=options.distil_tokens,
        model=model_source(options.model),
        text=options.text,
        context=count(options.context, name="--context"),
        seed=options.seed,
        tournament=options.tournament,
        dtype=options.dtype,
    )
    if options.fuse and lessons is not None:
        raise UsageError("`--fuse` makes one layer of several, which lessons compare; leave one of both out.")
    budget = dict(settings).get("memory.budget")
    budget_bytes = None if budget is None else size_bytes(str(budget), name="--memory")
    try:
        menu = Menu(
            widths=options.widths,
            experts=options.experts,
            width_multiple=options.width_multiple,
            windows=options.windows,
            linear=options.linear,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    return Order(
        model=options.model,
        text=options.text,
        out=options.out,
        scenarios=tuple(scenarios),
        targets=tuple(targets),
        metric=options.metric,
        rows=options.rows,
        context=count(options.context, name="--context"),
        every=options.every,
        joint=options.joint,
        rounds=options.rounds,
        anchors=options.anchors,
        batches=options.batches,
        context_rounds=options.context_rounds,
        menu=menu,
        block_steps=options.block_steps,
        couple=options.couple,
        lessons=lessons,
        tournament_tokens=0 if options.tournament is None else count(options.tournament, name="--tournament"),
        bf16_scores=options.bf16_scores,
        fuse=options.fuse,
        baselines=(*BASELINES, "drawn") if options.baselines else (),
        budget_bytes=budget_bytes,
        seed=options.seed,
    )


def _silence(_text: str) -> None:
    """Say nothing."""


def _print(tree: dict[str, Any], sentence: str, out: Path) -> None:
    say(f"\n{sentence}.\n")
    names = list(tree["parent"]["measured_s"])
    say(f"{'':<17}" + "".join(f"{name:>18}" for name in names) + f"{'loss':>9}{'KL':>9}{'same':>7}")
    for each in (tree["parent"], *filter(None, [tree["searched"]]), tree["child"], *tree["baselines"]):
        shares = (each["measured_s"][name] / tree["parent"]["measured_s"][name] for name in names)
        row = "".join(f"{share:>18.1%}" for share in shares)
        say(f"{each['name']:<17}{row}{each['loss']:>9.4f}{each['kl']:>9.4f}{each['agreement']:>7.1%}")
    worth = [f"{value:.4f} by {name}" for name, value in tree["harm_of_one_per_cent"].items() if value > 0]
    if worth:
        say(f"\nHarm that one per cent more would save: {', '.join(worth)}.")
    say(f"\n{out / 'child'}\n{out / 'report.html'}")


def _export(options: ExportOptions) -> int:
    from planish.compress.export import export_decilm, export_dense
    from planish.compress.fuse import fuse_child

    if options.out.exists() and any(options.out.iterdir()):
        raise UsageError(f"folder {options.out} is not empty, so nothing in it is touched; name another as `--out`.")
    if options.to == "fused":
        for each in fuse_child(options.child, options.out):
            say(f"networks of layers {', '.join(map(str, each.layers))} are one of {each.width:,} channels")
    else:
        (export_dense if options.to == "dense" else export_decilm)(options.child, options.out)
    say(f"{options.out}")
    return 0


def _verify(options: VerifyOptions) -> int:
    from planish.compress.verify import verify

    note = _silence if options.json else say
    checks = verify(options.child, parent=options.parent, rounds=options.rounds, note=note)
    if options.json:
        sys.stdout.write(json.dumps([asdict(each) for each in checks]) + "\n")
    else:
        say(f"{'':<24}{'said':<34}{'found':<24}")
        for each in checks:
            say(f"{each.name:<24}{each.told:<34}{each.found:<24}{'' if each.holds else 'worse'}")
    worse = [each.name for each in checks if not each.holds]
    if worse:
        raise VerificationFailed(f"{options.child} is not what was said of it: {', '.join(worse)}.")
    return 0
