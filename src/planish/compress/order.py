"""What a user asks of compression, and what it weighs to find out: settings, targets, memory of each stage."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from planish.compress.calibrate import Calibration
from planish.compress.costs import Costs, Numbers, Scenario, Sizes, cache_numbers, model_parameters
from planish.compress.scores import Metric
from planish.compress.search import Ceiling, share_of_parent, throughput
from planish.compress.serving import workspace_bytes
from planish.compress.space import Menu, Space
from planish.errors import DoesNotFit, UsageError
from planish.runfile import RunFile
from planish.units import format_bytes, parse_bytes

_SHARE = re.compile(r"\s*([0-9.]+)\s*x\s*")
_TIME = re.compile(r"\s*([0-9.]+)\s*(ms|s)\s*")
_HEAD_TILE_BYTES = 60 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One thing that the child must keep to.

    Attributes:
        kind: "latency", "memory" or "parameters".
        scenario: The label of the scenario it is about; empty for parameters.
        share: Part of what the parent has, or None.
        at_most: Seconds, bytes or numbers where no share is given.
        tokens_per_s: A latency by what runs at once, whatever the batch.
    """

    kind: str
    scenario: str = ""
    share: float | None = None
    at_most: float = 0.0
    tokens_per_s: float | None = None

    def ceiling(self, costs: Costs) -> Ceiling:
        """Return the target in numbers."""
        if self.tokens_per_s is not None:
            return throughput(costs.scenarios[self.scenario], self.tokens_per_s)
        bare = Ceiling(kind=self.kind, at_most=self.at_most, scenario=self.scenario)
        return bare if self.share is None else share_of_parent(bare, self.share, costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that decides about a child.

    Attributes:
        model: A transformers folder, a run folder or a built-in model.
        text: Sources of calibration, scores and judgement, one after the other.
        out: The folder of stages, child and report.
        scenarios: What is served.
        targets: What the child keeps to.
        metric: What harm is.
        rows: Rows that calibrate, score and judge.
        context: Tokens of a row.
        every: Scores count one of so many tokens.
        joint: Share of the pairs of sub-blocks that are measured together.
        rounds: Of each measurement of latency.
        anchors: Sub-blocks of each kind that are measured, the others fitted to them; None measures all.
        batches: Rows decoded at once that are tried; the one that lets the least harm through is served.
        context_rounds: Rounds of scores around the child that was found.
        menu: Options of every layer.
        calibration: How blocks are initialised.
        block_steps: Steps of blockwise distillation of each block that is smaller than the parent's; 0 for none.
        couple: Whether pairs of attention and network that are likely to be chosen are also trained together.
        lessons: How the child learns from its parent as a whole, text and folders excepted; None leaves it as it is.
        tournament_tokens: Tokens that several candidates share before the best of them has its lessons; 0 for none.
        bf16_scores: Whether scores run layers in bf16.
        fuse: Whether networks without attention between them become one, measured and judged so.
        baselines: Names of the baselines that are assembled, measured and judged too.
        budget_bytes: What tensors may hold in each stage; None for no limit.
        seed: Which rows, and what is drawn.
    """

    model: str
    text: tuple[str, ...]
    out: Path
    scenarios: tuple[Scenario, ...]
    targets: tuple[Target, ...]
    metric: Metric = "kl"
    rows: tuple[int, int, int] = (48, 16, 32)
    context: int = 512
    every: int = 2
    joint: float = 0.02
    rounds: int = 24
    anchors: int | None = None
    batches: tuple[int, ...] = ()
    context_rounds: int = 0
    menu: Menu = field(default_factory=Menu)
    block_steps: int = 0
    couple: bool = False
    lessons: RunFile | None = None
    tournament_tokens: int = 0
    bf16_scores: bool = False
    fuse: bool = False
    baselines: tuple[str, ...] = ()
    calibration: Calibration = field(default_factory=Calibration)
    budget_bytes: int | None = None
    seed: int = 0


def at_batch(order: Order, batch: int) -> Order:
    """Return `order` with `batch` rows decoded at once."""
    renamed = {each.label: replace(each, batch=batch) for each in order.scenarios if each.phase == "decode"}
    scenarios = tuple(renamed.get(each.label, each) for each in order.scenarios)
    targets = tuple(
        replace(each, scenario=renamed[each.scenario].label) if each.scenario in renamed else each
        for each in order.targets
    )
    return replace(order, scenarios=scenarios, targets=targets)


def parse_scenario(text: str, phase: str) -> Scenario:
    """Return the scenario that "batch x context" means, such as "1x1024".

    Raises:
        UsageError: Another form, or a size that is not positive.
    """
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", text)
    if match is None or "0" in (match[1], match[2]):
        raise UsageError(f'`--{phase}` must be rows x tokens such as "1x1024", got {text!r}.')
    return Scenario(phase="decode" if phase == "decode" else "prefill", batch=int(match[1]), context=int(match[2]))


def latency_targets(texts: Sequence[str], scenarios: Sequence[Scenario]) -> list[Target]:
    """Return the targets that `--latency` names: "0.65x" for every scenario, "decode=0.6x", "prefill=120ms".

    Raises:
        UsageError: Another form, or a phase that is not served.
    """
    found = []
    for text in texts:
        phase, equals, value = text.rpartition("=")
        named = [each for each in scenarios if not equals or each.phase == phase]
        if not named:
            known = " or ".join(dict.fromkeys(each.phase for each in scenarios))
            raise UsageError(f"`--latency` {text!r} is about {phase!r}, which is not served; write {known}.")
        share, seconds = _SHARE.fullmatch(value), _TIME.fullmatch(value)
        if share is not None:
            part = _share(float(share[1]), "--latency")
            found += [Target(kind="latency", scenario=each.label, share=part) for each in named]
        elif seconds is not None and equals:
            unit = 1e-3 if seconds[2] == "ms" else 1.0
            at_most = float(seconds[1]) * unit
            found += [Target(kind="latency", scenario=each.label, at_most=at_most) for each in named]
        else:
            raise UsageError(
                f'`--latency` must be a share of the parent such as "0.65x" or a time of one phase such as '
                f'"decode=12ms", got {text!r}.'
            )
    return found


def throughput_target(text: str, scenarios: Sequence[Scenario]) -> list[Target]:
    """Return the target of tokens per second in decode, all rows together, as a latency.

    Raises:
        UsageError: No number above zero, or no decode that is served.
    """
    try:
        tokens_per_s = float(text)
    except ValueError:
        tokens_per_s = 0.0
    served = [each for each in scenarios if each.phase == "decode"]
    if not tokens_per_s > 0 or not served:
        raise UsageError(f"`--throughput` must be tokens per second of a decode that is served, got {text!r}.")
    return [Target(kind="latency", scenario=each.label, tokens_per_s=tokens_per_s) for each in served]


def memory_target(text: str, scenarios: Sequence[Scenario]) -> list[Target]:
    """Return the target of bytes while serving: "0.7x" or a size, in every scenario.

    Raises:
        UsageError: Neither.
    """
    share = _SHARE.fullmatch(text)
    if share is not None:
        part = _share(float(share[1]), "--child-memory")
        return [Target(kind="memory", scenario=each.label, share=part) for each in scenarios]
    try:
        size = parse_bytes(text, name="--child-memory")
    except ValueError as error:
        raise UsageError(str(error)) from error
    return [Target(kind="memory", scenario=each.label, at_most=size) for each in scenarios]


def parameter_target(text: str) -> Target:
    """Return the target of size: "0.7x" or a number such as "95e6".

    Raises:
        UsageError: Neither.
    """
    share = _SHARE.fullmatch(text)
    if share is not None:
        return Target(kind="parameters", share=_share(float(share[1]), "--parameters"))
    try:
        count = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        count = 0.0
    if not count >= 1:
        raise UsageError(f'`--parameters` must be a share such as "0.7x" or a number such as "95e6", got {text!r}.')
    return Target(kind="parameters", at_most=count)


def _share(value: float, name: str) -> float:
    if not 0 < value <= 1:
        raise UsageError(f"`{name}` must be above 0x and at most 1x of the parent, got {value:g}x.")
    return value


def stage_bytes(space: Space, order: Order, sizes: Sizes, number_bytes: float, score_bytes: float) -> dict[str, int]:
    """Return what each stage's tensors hold at most, by stage.

    Args:
        space: What layers may be.
        order: The settings.
        sizes: Numbers in each sub-block.
        number_bytes: Of one of the model's numbers.
        score_bytes: Of one in the layers that are scored.
    """
    numbers = Numbers(weight_bytes=number_bytes, cache_bytes=number_bytes)
    ends = space.vocab_size * space.hidden_size * number_bytes * (1 if space.tied else 2)
    whole = model_parameters(space, space.parent, sizes) * number_bytes
    layer = max(sizes.values())
    batch = Scenario(phase="prefill", batch=min(4, order.rows[1]), context=order.context)
    temporary = workspace_bytes(space, space.parent.layers, batch, numbers)
    states = (len(space.layers) + 2) * batch.tokens * space.hidden_size * score_bytes
    tokens = order.rows[1] * (order.context // order.every)
    judged = tokens * (3 * space.hidden_size * 4 + 40)
    scored = (whole - ends) * score_bytes / number_bytes + ends + layer * (score_bytes + number_bytes)
    read = order.rows[2] * order.context * (3 * space.hidden_size * 4 + 40)
    cached = max(
        sum(cache_numbers(space, choice.attention, each.context + 1) for choice in space.parent.layers) * each.batch
        for each in order.scenarios
    )
    serving = max(workspace_bytes(space, space.parent.layers, each, numbers) for each in order.scenarios)
    return {
        "scores": int(scored + states + temporary + judged + _HEAD_TILE_BYTES),
        "measured children": int(2 * (whole + cached * number_bytes) + serving),
        "judgement": int(2 * whole + read + temporary + _HEAD_TILE_BYTES),
    }


def check_fits(stages: dict[str, int], budget_bytes: int | None) -> None:
    """Refuse to begin what would end over the budget.

    Raises:
        DoesNotFit: A stage holds more.
    """
    name, most = max(stages.items(), key=lambda each: each[1])
    if budget_bytes is not None and most > budget_bytes:
        raise DoesNotFit(
            f"`--memory` is {format_bytes(budget_bytes)}, stage {name!r} holds {format_bytes(most)}; nothing was "
            "started: allow that much, or score fewer and shorter rows."
        )
