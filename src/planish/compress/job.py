"""From a trained model to a verified child: stages that each go on where they stopped, and what they found."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from planish.compress.baselines import BASELINES, Task, drawn
from planish.compress.candidates import candidates
from planish.compress.costs import Costs, Scenario, model_parameters
from planish.compress.deliver import hand_over, write_untaught
from planish.compress.distil import distil_bytes
from planish.compress.eta import progress_of
from planish.compress.journal import Journal, key_of
from planish.compress.judge import Judge, Whole
from planish.compress.known import Known
from planish.compress.library import Library
from planish.compress.likely import block_names, likely, pairs_of
from planish.compress.measure import Timing, calibrated, machine, measure_costs, sizes_of
from planish.compress.order import Order, at_batch, check_fits, stage_bytes
from planish.compress.outcome import Judged, Outcome, record_of
from planish.compress.parent import open_parent
from planish.compress.pupil import Distillation
from planish.compress.runs import find_fusions, fused
from planish.compress.school import School
from planish.compress.scores import Scores, Scoring, influence, local_table, score, score_pairs
from planish.compress.search import Ceiling, as_problem, best_batch, pareto, search
from planish.compress.serving import model_bytes
from planish.compress.settle import Make, Quality, Settled, improve, settle
from planish.compress.space import Architecture
from planish.compress.stack import Stack
from planish.compress.stock import Stock
from planish.compress.text import rows_of
from planish.compress.tournament import Entrant
from planish.compress.verify import opened
from planish.data.encode import Tokenizer
from planish.errors import DoesNotFit
from planish.knapsack import prices
from planish.memory.ledger import Ledger

_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)
Note = Callable[[str], None]


class Job:
    """The stages of one order; each is run when it is first asked for.

    Args:
        order: The settings.
        folder: The parent's transformers folder.
        tokenizer: The parent's.
        dtype: Of the parent's weights and of the child's.
        note: Called with a sentence now and then.
    """

    def __init__(self, order: Order, folder: Path, tokenizer: Tokenizer, dtype: torch.dtype, note: Note) -> None:
        self.order, self._folder, self._note = order, folder, note
        self._tokenizer = tokenizer
        self._parent = open_parent(folder, device=torch.device("cpu"), dtype=dtype)
        self.space = self._parent.space(order.menu)
        size = torch.empty(0, dtype=dtype).element_size()
        self._score_dtype = torch.bfloat16 if order.bf16_scores else dtype
        score_size = torch.empty(0, dtype=self._score_dtype).element_size()
        largest = at_batch(order, max(order.batches)) if order.batches else order
        stages = stage_bytes(self.space, largest, sizes_of(self._parent.config, self.space), size, score_size)
        self._batch_is_open, self._far_folder = bool(order.batches), None
        resident = sum(each.nbytes for each in self._parent.resident())
        if order.block_steps:
            stages["distillation"] = self._distil_bytes(size)
            if order.budget_bytes is not None and stages["distillation"] + resident > order.budget_bytes:
                self._far_folder = order.out
                stages["distillation"] = self._distil_bytes(size)
        check_fits({name: each + resident for name, each in stages.items()}, order.budget_bytes)
        rows = rows_of(order.text, tokenizer, context=order.context, count=sum(order.rows))
        order_ = torch.randperm(len(rows), generator=torch.Generator().manual_seed(order.seed))
        self._calibration, self._scored, self._heldout = rows[order_].split(order.rows)

    def run(self) -> Outcome:
        """Run every stage that is not there yet, write the child, and return what was found.

        Raises:
            DoesNotFit: No child of the library keeps to the targets.
            WorldFailed: The disk refuses.
        """
        parent, lessons = self.space.parent, self.order.lessons
        school = None if lessons is None else School(self.order, lessons, self._folder, self._tokenizer, self._note)
        if self.order.batches:
            self._choose_batch()
        settled = self._settled(self._search)
        if settled is None:
            raise DoesNotFit("no child was found; the targets leave none.")
        best, costs, rounds = settled.architecture, settled.costs, {}
        if self.order.context_rounds:
            best, costs = self._rounds(best, costs)
            rounds = {"context rounds": replace(settled, architecture=best, costs=costs)}
        entrants, start = [], None
        if school is not None and self.order.tournament_tokens:
            entrants, found, start = self._tournament(school, {"search": settled} | rounds)
            best, costs = found.architecture, found.costs
        searched, child = self._finish(best, costs, school, start)
        baselines = tuple(self._baselines()) if self.order.baselines else ()
        known = self.scores.additivity()
        return Outcome(
            order=self.order,
            ceilings=self.ceilings,
            parent=self._judge("parent", parent, self.costs),
            child=child,
            searched=searched,
            entrants=tuple(entrants),
            baselines=baselines,
            curve=tuple((share, found.harm) for share, found in self._curve(costs)),
            harm=tuple(self.scores.value(i, each, self.order.metric) for i, each in enumerate(best.layers)),
            additivity=(known.count, known.rank_correlation, known.ratio),
            worth=self._worth(costs),
            machine=self.costs.machine,
        )

    def _distil_bytes(self, size: int) -> int:
        sizes, order = (self._parent.largest_layer_bytes, self._parent.ends_bytes, size), self.order
        return distil_bytes(self.space, order.rows[0], order.context, self._distillation, sizes, pairs=order.couple)

    @property
    def _distillation(self) -> Distillation:
        return Distillation(steps=self.order.block_steps, seed=self.order.seed, folder=self._far_folder)

    @cached_property
    def _stock(self) -> Stock:
        return Stock(
            self.order,
            self._parent,
            self._calibration,
            self._distillation,
            bounded=self._bounded,
            note=self._note,
        )

    @cached_property
    def singles(self) -> Library:
        """Every block, those trained that a search by their own errors is likely to choose, where that was asked for.

        Where the batch is still to be chosen there is nothing to search by, and all are trained.
        """
        if not self.order.block_steps:
            return self._stock.initial
        if self._batch_is_open:
            return self._stock.trained(None)
        choices = likely(self.space, local_table(self._stock.initial), self.ceilings, self.costs)
        return self._stock.trained(block_names(self.space, choices))

    @cached_property
    def library(self) -> Library:
        """The same, with the pairs trained together that a search by scores is likely to choose."""
        if not self.order.couple:
            return self.singles
        harm = self.single_scores.table(self.space, self.order.metric)
        choices = likely(self.space, harm, self.ceilings, self.costs)
        return self._stock.in_pairs(self.singles, pairs_of(self.space, choices))

    def _plain_costs(self, scenarios: tuple[Scenario, ...]) -> Costs:
        initial = self._stock.initial
        served = initial.made_from, str(self.space), self.order.rounds, self.order.anchors
        key = key_of(*served, machine(torch.device("cpu")))
        return measure_costs(
            initial,
            scenarios,
            Timing(rounds=self.order.rounds, anchors=self.order.anchors),
            fuse=self.order.fuse,
            journal=Journal(self.order.out / "costs.jsonl", key),
            progress=progress_of(self._note, "costs"),
        )

    def _choose_batch(self) -> None:
        """Serve the batch that lets the least harm through, by what sub-blocks take."""

        def problem(batch: int) -> tuple[list[Ceiling], Costs]:
            order = at_batch(self.order, batch)
            costs = self._plain_costs(order.scenarios)
            return [target.ceiling(costs) for target in order.targets], costs

        harm = self.single_scores.table(self.space, self.order.metric)
        batch, _ = best_batch(problem, self.space, harm, self.order.batches)
        self._note(f"batch: {batch} rows decoded at once, of {', '.join(map(str, self.order.batches))}")
        self.order = at_batch(self.order, batch)

    @cached_property
    def known(self) -> Known:
        """What was measured and judged of children."""
        return Known(
            self._stock.initial,
            self.order.scenarios,
            rounds=self.order.rounds,
            heldout=self._heldout,
            folder=self.order.out,
            fuse=self.order.fuse,
        )

    @cached_property
    def costs(self) -> Costs:
        """Costs that are right about the parent."""
        return calibrated(self._plain_costs(self.order.scenarios), self.known.parent_s, self.space.parent)

    @cached_property
    def ceilings(self) -> tuple[Ceiling, ...]:
        """The targets in numbers."""
        return tuple(target.ceiling(self.costs) for target in self.order.targets)

    @cached_property
    def single_scores(self) -> Scores:
        """What each option does alone."""
        with self._bounded():
            found = score(
                Stack(self.singles, dtype=self._score_dtype),
                self._scoring_judge,
                self._scoring,
                journal=self._scored_in("scores", self.singles),
                progress=progress_of(self._note, "scores"),
            )
        known = found.additivity()
        if not known.holds:
            self._note(
                f"scores: the harms of attention and network do not add up (rank correlation "
                f"{known.rank_correlation:.2f} over {known.count} layers); `--joint 1` measures every pair"
            )
        return found

    @cached_property
    def scores(self) -> Scores:
        """The same, with what the pairs do that were trained together."""
        if not self.order.couple:
            return self.single_scores
        with self._bounded():
            pairs = score_pairs(
                Stack(self.library, dtype=self._score_dtype),
                self._scoring_judge,
                self._scoring,
                journal=self._scored_in("pair-scores", self.library),
                progress=progress_of(self._note, "scores of pairs"),
            )
        return replace(self.single_scores, pairs=pairs)

    def _scored_in(self, name: str, library: Library) -> Journal:
        asked = self._scored.tolist(), str(self._scoring), str(self._score_dtype)
        return Journal(self.order.out / f"{name}.jsonl", key_of(library.made_from, str(self.space), *asked))

    @property
    def _scoring(self) -> Scoring:
        return Scoring(
            every=self.order.every, batch_rows=min(4, self.order.rows[1]), joint=self.order.joint, seed=self.order.seed
        )

    @cached_property
    def _scoring_judge(self) -> Judge:
        return Judge(Stack(self.singles, dtype=self._score_dtype), self._scored, every=self.order.every)

    def _search(self, costs: Costs) -> Architecture:
        harm = self.scores.table(self.space, self.order.metric)
        return search(self.space, harm, self.ceilings, costs).architecture

    def _settled(self, make: Make) -> Settled | None:
        return settle(make, self.ceilings, self.costs, self.known.seconds)

    def _rounds(self, child: Architecture, costs: Costs) -> tuple[Architecture, Costs]:
        better, told = improve(
            self.library,
            child,
            self._scoring_judge,
            self.ceilings,
            costs,
            self._scoring,
            radius=max(1, len(child.layers) // 4),
            rounds=self.order.context_rounds,
            dtype=self._score_dtype,
        )
        for each in told:
            kept = "kept" if each.accepted else "not kept"
            self._note(f"round: {each.changed} layers changed, KL {each.kl_before:.4f} -> {each.kl_after:.4f}, {kept}")
        measured = self.known.seconds(better)
        limits = {each.scenario: each.at_most for each in self.ceilings if each.kind == "latency"}
        if any(measured[label] > limit * 1.02 for label, limit in limits.items()):
            self._note("round: the new child is slower than predicted and above a limit; the one before is kept")
            return child, costs
        return better, calibrated(costs, measured, better)

    def _judge(self, name: str, child: Architecture, costs: Costs, found: Quality | None = None) -> Judged:
        """Return what is known of a child; `found` is its quality where it is not as the library makes it."""
        if found is None:
            self._note(f"judged: {name}")
            with self._bounded():
                found = self.known.quality(self.library, child)
        measured = self.known.parent_s if child == self.space.parent else self.known.seconds(child)
        return Judged(
            name=name,
            architecture=child,
            predicted={label: costs.model_seconds(child, label) for label in measured},
            measured=dict(measured),
            memory_bytes={
                label: model_bytes(self.space, child, scenario, costs.numbers, costs.sizes)
                for label, scenario in costs.scenarios.items()
            },
            parameters=self._parameters(child, costs),
            quality=found,
        )

    def _parameters(self, child: Architecture, costs: Costs) -> int:
        if self.order.fuse:  # what runs become has widths that no block has
            return model_parameters(self.space, fused(child, find_fusions(child)))
        return model_parameters(self.space, child, costs.sizes)

    def _finish(
        self, best: Architecture, costs: Costs, school: School | None, start: Path | None
    ) -> tuple[Judged | None, Judged]:
        """Write the child, taught where that was asked for, and return it before and after its lessons.

        It is measured and judged as transformers opens what was written.

        Args:
            best: Its layers.
            costs: That hold for it.
            school: Where it learns.
            start: What it has learned already.

        Raises:
            VerificationFailed: What was written is not of the size that was searched for.
        """
        folder, name = self.order.out / "child", key_of(self.library.made_from, self.known.name(best))
        searched, made = None, folder
        if school is None:
            write_untaught(self.library, best, folder, self._folder, fuse=self.order.fuse)
        else:
            searched = self._judge("search", best, costs)
            made, name = school.taught(self.library, best, start)
        self._note("child: opened by transformers, measured and judged")
        size = self._parameters(best, costs)
        whole, held_bytes = opened(made, self.order.scenarios, parameters=size)
        with self._bounded():
            found = self.known.quality_as(name, lambda: Whole(whole))
        child = replace(self._judge("child" if searched else "search", best, costs, found), memory_bytes=held_bytes)
        hand_over(made, folder, record_of(child, self.order, self._folder, self.ceilings, self.known.parent_s))
        return searched, child

    @cached_property
    def _task(self) -> Task:
        return Task(
            space=self.space,
            harm=self.scores.table(self.space, self.order.metric),
            ceilings=self.ceilings,
            costs=self.costs,
            influence=influence(Stack(self.library, dtype=self._score_dtype), self._scored),
            seed=self.order.seed,
        )

    def _tournament(self, school: School, first: dict[str, Settled]) -> tuple[list[Entrant], Settled, Path]:
        """Return how candidates fared, the winner first, the winner, and the folder of what it has learned.

        They are ranked on the rows that score: those that judge have chosen nothing.
        """
        found = candidates(first, self.scores, self._task, self.known.seconds, metric=self.order.metric)
        names = {name: each.architecture for name, each in found.items()}
        judge = Judge(Stack(self.singles), self._scored, every=self.order.every)
        entrants, start = school.tournament(self.library, names, judge)
        return entrants, found[entrants[0].name], start

    def _baselines(self) -> list[Judged]:
        found = []
        for name in self.order.baselines:
            make = BASELINES.get(name, drawn)
            settled = self._settled(lambda now, make=make: make(replace(self._task, costs=now)))
            if settled is not None:
                found.append(self._judge(name, settled.architecture, settled.costs))
        return found

    def _curve(self, costs: Costs) -> list[tuple[float, Any]]:
        """Return the best child at shares of the parent, latency and memory moved together."""
        harm = self.scores.table(self.space, self.order.metric)
        return pareto(self.space, harm, self.ceilings, costs, _SHARES)

    def _worth(self, costs: Costs) -> dict[str, float]:
        """Return what a per cent more of each ceiling is worth in harm."""
        harm = self.scores.table(self.space, self.order.metric)
        found = prices(as_problem(self.space, harm, self.ceilings, costs))
        return {
            each.name: found.get(each.name, 0.0) * each.at_most * _unit(each, costs) / 100 for each in self.ceilings
        }

    def _bounded(self) -> AbstractContextManager[Any]:
        """Hold a stage's tensors to the budget, where there is one."""
        budget = self.order.budget_bytes
        return nullcontext() if budget is None else Ledger(budget_bytes=budget)


def _unit(ceiling: Ceiling, costs: Costs) -> float:
    """Return how much of its row one unit of a ceiling is: rows are before calibration."""
    return 1 / costs.factors.get(ceiling.scenario, 1.0) if ceiling.kind == "latency" else 1.0
