"""What each option of each layer does to a model's text when it alone is put in, measured from that layer on."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from planish.compress.blocks import Kind
from planish.compress.journal import Journal
from planish.compress.judge import Judge, Judgement
from planish.compress.library import Library
from planish.compress.space import Architecture, Choice, Space
from planish.compress.stack import Stack

Metric = Literal["kl", "loss", "cosine", "local"]
Trials = dict[str, tuple[int, Choice | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one replaced sub-block costs, with the standard error over rows.

    Attributes:
        kl: KL(parent || child) less that of the model around it, in nats a token.
        loss: Next-token loss, likewise.
        cosine: One less the cosine of the hidden states before the head, likewise.
        kl_error: Standard error of `kl`.
        loss_error: Of `loss`.
    """

    kl: float
    loss: float
    cosine: float
    kl_error: float
    loss_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Additivity:
    """How well the two sub-blocks' scores sum to that of the layer with both replaced.

    Attributes:
        count: Layers that were tried with both.
        rank_correlation: Spearman's, of sums and joint scores.
        ratio: Median of joint over sum.
    """

    count: int
    rank_correlation: float
    ratio: float

    @property
    def holds(self) -> bool:
        """Whether sums order layers as joint scores do."""
        return self.count < 3 or self.rank_correlation >= 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores around one architecture.

    Attributes:
        around: What the rest of the model is; the parent, or a child.
        base: Of `around` itself.
        parts: By "layer kind label", of single sub-blocks.
        local: The library's errors, by the same names.
        joint: By "layer label", of layers that were measured with both replaced.
        pairs: The same of those whose sub-blocks were trained together.
        num_tokens: Tokens that count.
    """

    around: Architecture
    base: Score
    parts: Mapping[str, Score]
    local: Mapping[str, float]
    joint: Mapping[str, Score]
    num_tokens: int
    pairs: Mapping[str, Score] = field(default_factory=dict)

    def value(self, index: int, choice: Choice, metric: Metric) -> float:
        """Return what `choice` at layer `index` adds: measured with both, or the sum of its sub-blocks'."""
        if metric == "local":
            return sum(self.local[name] for name in _names(index, choice))
        name = f"{index} {choice.label}"
        known = self.pairs.get(name) or self.joint.get(name)
        if known is not None:
            return getattr(known, metric)
        return sum(getattr(self.parts[name], metric) for name in _names(index, choice))

    def table(self, space: Space, metric: Metric = "kl") -> list[list[float]]:
        """Return the value of every choice of every layer, in the order of `LayerSpace.choices`."""
        return [
            [self.value(index, choice, metric) for choice in layer.choices] for index, layer in enumerate(space.layers)
        ]

    def additivity(self) -> Additivity:
        """Return how sums compare with joint scores, where both are known."""
        pairs = []
        for name, joint in self.joint.items():
            index, label = name.split()
            attention, ffn = label.split("+")
            names = (f"{index} attention {attention}", f"{index} ffn {ffn}")
            pairs.append((sum(self.parts[each].kl for each in names), joint.kl))
        if len(pairs) < 3:
            return Additivity(count=len(pairs), rank_correlation=math.nan, ratio=math.nan)
        sums, joints = np.array(pairs).T
        ratio = float(np.median(joints / np.where(sums == 0, np.nan, sums)))
        return Additivity(count=len(pairs), rank_correlation=_spearman(sums, joints), ratio=ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How scores are measured.

    Attributes:
        every: The head sees the last of each `every` tokens.
        batch_rows: Rows whose hidden states at every layer are in memory at once.
        joint: Share of layers' joint choices that are measured with both sub-blocks replaced, to check their sum.
        seed: Which.
    """

    every: int = 1
    batch_rows: int = 4
    joint: float = 0.02
    seed: int = 0


def score(
    stack: Stack,
    judge: Judge,
    settings: Scoring,
    *,
    journal: Journal | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Return what each option of each layer does alone in `stack`, by running the layers from its own on.

    Memory:        the model, a layer, and of `batch_rows` rows: the hidden states before every layer and one layer's
        activations; the judge.
    Exactness:     bitwise what the whole model with that layer would give.

    Args:
        stack: The model around; the parent, or a child.
        judge: The parent's own text.
        settings: How.
        journal: Where results are kept as they are found.
        progress: Called with the sub-blocks done and their number after each.
    """
    pairs: Trials = {name: (index, each) for name, index, each in _pair_trials(stack, stack.library.pairs())}
    trials: Trials = {name: (index, choice) for name, index, choice in _trials(stack, settings)}
    means = _means(stack, judge, settings, trials | pairs, journal or Journal(None, ""), progress)
    base = means.pop("base")
    scores = {name: _score(rows, base) for name, rows in means.items()}
    zero = Score(kl=0.0, loss=0.0, cosine=0.0, kl_error=0.0, loss_error=0.0)
    for index, choice in enumerate(stack.architecture.layers):
        scores |= dict.fromkeys(_names(index, choice), zero)
    own = _score(base, np.array([[0.0, float(judge.nll.mean()), 1.0]] * len(base)))
    both = {name: each for name, each in scores.items() if len(name.split()) == 2}
    return Scores(
        around=stack.architecture,
        base=own,
        parts={name: each for name, each in scores.items() if len(name.split()) == 3},
        local=local_errors(stack.library),
        joint={name: each for name, each in both.items() if name not in pairs},
        num_tokens=judge.num_tokens,
        pairs={name: each for name, each in both.items() if name in pairs},
    )


def score_pairs(
    stack: Stack,
    judge: Judge,
    settings: Scoring,
    *,
    journal: Journal | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Score]:
    """Return what the pairs of the stack's library do, each alone; the rest is as `score`."""
    trials: Trials = {"base": (len(stack.layers), None)}
    trials |= {name: (index, choice) for name, index, choice in _pair_trials(stack, stack.library.pairs())}
    means = _means(stack, judge, settings, trials, journal or Journal(None, ""), progress)
    base = means.pop("base")
    return {name: _score(rows, base) for name, rows in means.items()}


def _means(
    stack: Stack,
    judge: Judge,
    settings: Scoring,
    trials: Trials,
    kept: Journal,
    progress: Callable[[int, int], None] | None,
) -> dict[str, np.ndarray]:
    """Return each row's divergence, loss and cosine in each trial."""
    starts = range(0, len(judge.rows), settings.batch_rows)
    done, total = 0, len(trials) * len(starts)
    for start in starts:
        states: list[Tensor] | None = None
        ids = judge.rows[start : start + settings.batch_rows]
        for name, (index, choice) in trials.items():
            key = f"{name} @{start}"
            if key not in kept:
                states = states or list(stack.states(ids))
                kept.put(key, _measure(stack, judge, states, index, choice, start))
            done += 1
            if progress is not None:
                progress(done, total)
    return {name: _joined(kept, name, starts) for name in trials}


def _pair_trials(stack: Stack, pairs: Mapping[int, Sequence[Choice]]) -> Iterator[tuple[str, int, Choice]]:
    for index, choices in pairs.items():
        for choice in choices:
            if choice != stack.architecture.layers[index]:
                yield f"{index} {choice.label}", index, choice


def _trials(stack: Stack, settings: Scoring) -> Iterator[tuple[str, int, Choice | None]]:
    """Yield what is measured: the model itself, each other sub-block alone, and a sample of both at once."""
    yield "base", len(stack.layers), None
    space = stack.library.space
    for index, (own, layer) in enumerate(zip(stack.architecture.layers, space.layers, strict=True)):
        for attention in layer.attention:
            if attention != own.attention:
                yield f"{index} attention {attention.label}", index, Choice(attention=attention, ffn=own.ffn)
        for ffn in layer.ffn:
            if ffn != own.ffn:
                yield f"{index} ffn {ffn.label}", index, Choice(attention=own.attention, ffn=ffn)
    both = [
        (f"{index} {choice.label}", index, choice)
        for index, (own, layer) in enumerate(zip(stack.architecture.layers, space.layers, strict=True))
        for choice in layer.choices
        if choice.attention != own.attention and choice.ffn != own.ffn
    ]
    count = min(len(both), math.ceil(settings.joint * len(both)))
    picked = np.random.default_rng(settings.seed).choice(len(both), count, replace=False) if count else []
    yield from (both[each] for each in sorted(picked))


def _measure(
    stack: Stack, judge: Judge, states: Sequence[Tensor], index: int, choice: Choice | None, start: int
) -> list[list[float]]:
    layer = None if choice is None else stack.layer(index, choice)
    final = stack.after(index, states[index], layer)
    return row_means(judge.judge(final, stack.head, start))


def row_means(found: Judgement) -> list[list[float]]:
    """Return each row's mean divergence, loss and cosine."""
    return torch.stack([found.kl.mean(1), found.nll.mean(1), found.cosine.mean(1)], 1).tolist()


def _joined(kept: Journal, name: str, starts: range) -> np.ndarray:
    return np.concatenate([np.array(kept[f"{name} @{start}"]) for start in starts])


def _score(rows: np.ndarray, base: np.ndarray) -> Score:
    """Return the mean difference over rows and its standard error; rows of one text are not independent tokens."""
    difference = rows - base
    mean = difference.mean(0)
    error = difference.std(0, ddof=1) / math.sqrt(len(rows)) if len(rows) > 1 else np.full(3, math.nan)
    return Score(
        kl=float(mean[0]),
        loss=float(mean[1]),
        cosine=float(-mean[2]),
        kl_error=float(error[0]),
        loss_error=float(error[1]),
    )


def local_errors(library: Library) -> dict[str, float]:
    """Return the library's errors by "layer kind label"."""
    kinds: tuple[Kind, Kind] = ("attention", "ffn")
    return {
        f"{index} {kind} {option.label}": library.error(index, kind, option)
        for index, layer in enumerate(library.space.layers)
        for kind in kinds
        for option in getattr(layer, kind)
    }


def local_table(library: Library) -> list[list[float]]:
    """Return the sum of both sub-blocks' errors of every choice of every layer."""
    errors = local_errors(library)
    return [
        [sum(errors[name] for name in _names(index, choice)) for choice in layer.choices]
        for index, layer in enumerate(library.space.layers)
    ]


def _names(index: int, choice: Choice) -> tuple[str, str]:
    return f"{index} attention {choice.attention.label}", f"{index} ffn {choice.ffn.label}"


def _spearman(a: np.ndarray, b: np.ndarray) -> float:
    ranks = [np.argsort(np.argsort(each)) for each in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


@torch.no_grad()
def influence(stack: Stack, rows: Tensor, *, batch_rows: int = 4) -> list[float]:
    """Return how much each layer turns the hidden states: 1 - E[cos(before, after)].

    Memory:        the hidden states of `batch_rows` rows before and after a layer.

    References:
        Men et al., ShortGPT (2024), equation 1 (Block Influence).
    """
    turned = torch.zeros(len(stack.layers), dtype=torch.float64)
    for start in range(0, len(rows), batch_rows):
        states = stack.states(rows[start : start + batch_rows])
        before = next(states)
        for index, after in enumerate(states):
            turned[index] += (1 - cosine_similarity(before.double(), after.double(), dim=-1)).sum().cpu()
            before = after
    return (turned / rows.numel()).tolist()
