"""How long sub-blocks and whole models take on this machine: in turns, weights out of the caches, the least of many."""

import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from planish.compress.blocks import Blocks, config_of, overrides
from planish.compress.costs import (
    Costs,
    Numbers,
    Price,
    Scenario,
    fit_rates,
    home_of,
    launch_seconds,
    options_of,
    work_of,
)
from planish.compress.journal import Journal
from planish.compress.library import Library
from planish.compress.space import (
    Architecture,
    AttentionOption,
    Choice,
    FfnOption,
    KeepHeads,
    LinearAttention,
    NoAttention,
    NoFfn,
    SlidingWindow,
    Space,
    attends,
)
from planish.models.child import child_config, model_class

Run = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How latency is measured.

    Attributes:
        rounds: Times that everything is run, in turns; the least counts.
        copies: Sets of weights that take turns, so that none waits in a cache.
        cold_bytes: More sets are made until all together are as large, or as large as the parent.
        anchors: Sub-blocks of each kind that are measured; the others are fitted to them. None measures all.
    """

    rounds: int = 24
    copies: int = 4
    cold_bytes: int = 2**28
    anchors: int | None = None


def measure_costs(
    library: Library,
    scenarios: Sequence[Scenario],
    timing: Timing,
    *,
    fuse: bool = False,
    device: torch.device | None = None,
    journal: Journal | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Costs:
    """Return what the children of a library cost here.

    Memory:        `copies` of each measured sub-block with its keys and values, and embedding and head.

    Args:
        library: Of blocks; their weights do not matter.
        scenarios: What is served.
        timing: How.
        fuse: Whether networks without attention between them become one.
        device: Default: the CPU.
        journal: Where results are kept as they are found.
        progress: Called with the scenarios done and their number after each.
    """
    kept = journal or Journal(None, "")
    device = device or torch.device("cpu")
    size = torch.empty(0, dtype=library.dtype).element_size()
    numbers = Numbers(weight_bytes=size, cache_bytes=size)
    prices: dict[str, dict[str, Price]] = {}
    ends_s: dict[str, float] = {}
    for done, scenario in enumerate(scenarios):
        if scenario.label not in kept:
            kept.put(scenario.label, _measure_scenario(library, scenario, timing, device))
        found = dict(kept[scenario.label])
        ends_s[scenario.label] = found.pop("ends")
        prices[scenario.label] = complete(library.space, scenario, numbers, found)
        if progress is not None:
            progress(done + 1, len(scenarios))
    return Costs(
        space=library.space,
        numbers=numbers,
        machine=machine(device),
        prices=prices,
        ends_s=ends_s,
        scenarios={each.label: each for each in scenarios},
        factors={},
        sizes=sizes_of(library.config, library.space),
        joined_s={label: launch_seconds(each) for label, each in prices.items()} if fuse else {},
    )


def sizes_of(config: Any, space: Space) -> dict[str, int]:
    """Return the numbers in every sub-block of a space, norms and biases of its family included."""
    blocks = Blocks(config)
    return {
        name: sum(
            each.numel()
            for each in blocks.bare(home_of(space, option), _alone(option), dtype=torch.float32).parameters()
        )
        for name, option in options_of(space).items()
    }


def complete(space: Space, scenario: Scenario, numbers: Numbers, measured: Mapping[str, float]) -> dict[str, Price]:
    """Return the price of every sub-block of a space: measured where it was, else by the fit to those that were."""
    options = options_of(space)
    found = {name: Price(seconds=seconds, source="measured") for name, seconds in measured.items()}
    missing = [name for name in options if name not in found]
    if missing:
        rates = fit_rates((work_of(space, options[name], scenario, numbers), s) for name, s in measured.items())
        for name in missing:
            seconds = rates.seconds(work_of(space, options[name], scenario, numbers))
            found[name] = Price(seconds=seconds, source="fitted")
    return found


def choose_anchors(names: Sequence[str], count: int | None) -> list[str]:
    """Return `count` of `names`, spread evenly from the first to the last; all where `count` is None."""
    if count is None or count >= len(names):
        return list(names)
    if count < 2:
        return list(names[:count])
    return [names[round(place * (len(names) - 1) / (count - 1))] for place in range(count)]


def machine(device: torch.device) -> str:
    """Return what was measured on, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def _measure_scenario(library: Library, scenario: Scenario, timing: Timing, device: torch.device) -> dict[str, float]:
    options = options_of(library.space)
    names: list[str] = []
    for kind in ("attention", "ffn"):
        alike = [name for name in options if name.startswith(kind) and _works(options[name])]
        names += choose_anchors(alike, timing.anchors)
    copies = _copies(library, names, timing)
    makers = {name: [_sub_block(library, options[name], scenario, device) for _ in range(copies)] for name in names}
    makers["ends"] = [_ends(library, scenario, device)]
    found = in_turns(makers, timing.rounds, device)
    nothing = {name: 0.0 for name in options if not _works(options[name])}
    return found | nothing


def _works(option: AttentionOption | FfnOption) -> bool:
    return not isinstance(option, NoAttention | NoFfn)


def _copies(library: Library, names: Iterable[str], timing: Timing) -> int:
    sizes = sizes_of(library.config, library.space)
    one = sum(sizes[name] for name in names) * torch.empty(0, dtype=library.dtype).element_size()
    return max(timing.copies, min(len(library.space.layers), math.ceil(timing.cold_bytes / max(one, 1))))


def _alone(option: AttentionOption | FfnOption) -> Choice:
    if isinstance(option, KeepHeads | SlidingWindow | LinearAttention | NoAttention):
        return Choice(attention=option, ffn=NoFfn())
    return Choice(attention=NoAttention(), ffn=option)


@torch.no_grad()
def _sub_block(library: Library, option: AttentionOption | FfnOption, scenario: Scenario, device: torch.device) -> Run:
    """Return a run of a layer that has this sub-block alone, with its own weights and cache."""
    blocks, choice = Blocks(library.config), _alone(option)
    home = 0 if attends(choice.attention) else home_of(library.space, option)  # its cache is the first layer's
    layer = _drawn(blocks.empty(home, choice, device=device, dtype=library.dtype))
    tokens = scenario.context if scenario.phase == "prefill" else 1
    hidden = torch.randn(scenario.batch, tokens, library.space.hidden_size, dtype=library.dtype, device=device)
    if not attends(choice.attention):
        return lambda: _quiet(layer, hidden)
    cache = DynamicCache(config=child_config(blocks.config, {0: overrides(blocks.config, choice)}))
    if scenario.phase == "decode":
        shape = (scenario.batch, choice.attention.kv_heads, scenario.context, library.space.head_dim)
        cache.update(*(torch.randn(shape, dtype=library.dtype, device=device) for _ in range(2)), 0)
    start = scenario.context if scenario.phase == "decode" else 0
    position_ids = torch.arange(start, start + tokens, device=device)[None]
    call = blocks.around_call(layer, hidden, position_ids, cache=cache)
    restore = keeper(cache)

    def run() -> object:
        restore()
        return _quiet(layer, hidden, **call, cache=cache, use_cache=True)

    return run


@torch.no_grad()
def _quiet(layer: nn.Module, hidden: Tensor, **call: Any) -> Tensor:
    return layer(hidden, **call)


def _drawn(module: nn.Module) -> Any:
    """Return `module` with ordinary numbers; zeros and denormals take another time than these."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    return module


def keeper(cache: DynamicCache) -> Run:
    """Return what brings `cache` back to how it is now; what grows is another tensor each time."""
    states = [dict(layer.__dict__) for layer in cache.layers]

    def restore() -> None:
        for layer, state in zip(cache.layers, states, strict=True):
            layer.__dict__.clear()
            layer.__dict__.update(state)

    return restore


@torch.no_grad()
def _ends(library: Library, scenario: Scenario, device: torch.device) -> Run:
    """Return a run of a child whose layers are all nothing."""
    space = library.space
    nothing = Architecture(layers=(Choice(attention=NoAttention(), ffn=NoFfn()),) * len(space.layers))
    config = config_of(library.config, nothing)
    with torch.device("meta"):
        model: Any = model_class(config.parent_type)(config).to(library.dtype)
    model = _drawn(model.to_empty(device=device)).eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config=library.config).to(device)
    tokens = scenario.context if scenario.phase == "prefill" else 1
    ids = torch.zeros(scenario.batch, tokens, dtype=torch.long, device=device)

    @torch.no_grad()
    def run() -> object:
        return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    return run


@torch.no_grad()
def model_run(model: PreTrainedModel, scenario: Scenario) -> Run:
    """Return a run of a whole model in `scenario`: a prompt of it into a new cache, or one token after it.

    Memory:        the model, its cache, one prompt's temporaries.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    shape = (scenario.batch, scenario.context)
    ids = torch.randint(vocab_size, shape, generator=generator).to(model.device)
    call = {"use_cache": True, "logits_to_keep": 1}
    if scenario.phase == "prefill":

        @torch.no_grad()
        def prompt() -> object:
            return model(input_ids=ids, **call).logits

        return prompt
    cache = model(input_ids=ids, **call).cache
    restore, one = keeper(cache), ids[:, -1:]

    @torch.no_grad()
    def token() -> object:
        restore()
        return model(input_ids=one, cache=cache, **call).logits

    return token


def in_turns(runs: Mapping[str, Sequence[Run]], rounds: int, device: torch.device) -> dict[str, float]:
    """Return the least seconds of each, all taking turns; odd rounds go backwards, each round takes the next copy."""
    best = dict.fromkeys(runs, math.inf)
    for copies in runs.values():
        for run in copies:
            run()
    for number in range(rounds):
        names = list(runs)
        for name in reversed(names) if number % 2 else names:
            run = runs[name][number % len(runs[name])]
            best[name] = min(best[name], _seconds(run, device))
    return best


def _seconds(run: Run, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


class Rival:
    """Measures children beside the parent: what slows the machine down slows both, and their ratio stays.

    Memory:        parent and child.

    Args:
        parent: The model that children are compared with.
        scenarios: What is served.
        rounds: Of each comparison.
        parent_s: The parent's seconds where they are known; default: measured now.

    Attributes:
        parent_s: The parent's seconds by scenario's label, the least that was seen.
    """

    def __init__(
        self,
        parent: PreTrainedModel,
        scenarios: Iterable[Scenario],
        rounds: int,
        parent_s: Mapping[str, float] | None = None,
    ) -> None:
        self._parent, self._rounds = parent, rounds
        self._scenarios = tuple(scenarios)
        self.parent_s = dict(parent_s or {}) or {
            each.label: in_turns({"parent": [model_run(parent, each)]}, rounds, parent.device)["parent"]
            for each in self._scenarios
        }

    def measure(self, child: PreTrainedModel) -> dict[str, float]:
        """Return the child's seconds by scenario's label, at the parent's pace."""
        found = {}
        for each in self._scenarios:
            runs = {"parent": [model_run(self._parent, each)], "child": [model_run(child, each)]}
            seconds = in_turns(runs, self._rounds, child.device)
            found[each.label] = seconds["child"] / seconds["parent"] * self.parent_s[each.label]
        return found


def calibrated(costs: Costs, measured: Mapping[str, float], architecture: Architecture) -> Costs:
    """Return `costs` that predict what was measured of an assembled `architecture`."""
    factors = dict(costs.factors)
    for label, seconds in measured.items():
        factors[label] = factors.get(label, 1.0) * seconds / costs.model_seconds(architecture, label)
    return replace(costs, factors=factors)
