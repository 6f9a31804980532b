"""SmolLM2-135M at a share of its CPU latency, before any training: quality kept by the search and by every baseline.

Decode (batch 1, after 1,024 tokens) and prefill (512 tokens) both have to come down. Library, costs and scores are made
once and kept in `--folder`, so that an interrupted run goes on; every child is assembled, measured beside its parent
and, until prediction and measurement agree, chosen again. Quality is judged on text that neither calibration nor scores
have read. The gap of a baseline is the loss that it adds to the parent's; recovered is the part of it that is avoided.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import AutoTokenizer

from harness import write_result
from planish.compress.baselines import BASELINES, Task, drawn
from planish.compress.costs import Costs, Scenario, model_parameters
from planish.compress.journal import Journal, key_of
from planish.compress.judge import Judge
from planish.compress.known import Known
from planish.compress.library import Library
from planish.compress.make import make_library
from planish.compress.measure import Timing, calibrated, measure_costs
from planish.compress.parent import StreamedParent
from planish.compress.scores import Scoring, influence, score
from planish.compress.search import Ceiling, search
from planish.compress.settle import Make, Settled, improve, settle
from planish.compress.space import Architecture
from planish.compress.stack import Stack
from planish.compress.text import rows_of
from planish.models.builtin import model_folder

SCENARIOS = (Scenario(phase="decode", context=1024), Scenario(phase="prefill", context=512))
TEXT = ("builtin:english",)


def main() -> None:
    """Run every stage that is not there yet and write the figures."""
    options = parser(__doc__).parse_args()
    torch.set_grad_enabled(False)
    torch.manual_seed(options.seed)
    scene = Scene(options)
    shares = {}
    for share in options.shares:
        shares[f"{share:g}"] = scene.at(share)
    figures = {
        "model": options.model,
        "trial": options.trial,
        "calibration rows": list(scene.calibration.shape),
        "score rows": list(scene.scored.shape),
        "held-out rows": list(scene.heldout.shape),
        "parent": asdict(scene.parent_quality) | {"seconds": scene.known.parent_s},
        "additivity": asdict(scene.scores.additivity()),
        "shares": shares,
    }
    print(write_result(options.result, figures, seed=options.seed))


def parser(description: str | None, result: str = "puzzle") -> argparse.ArgumentParser:
    """Return the options that every bench of a folder has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True, help="where library, costs and scores are kept")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--library", type=Path, help="one that is there already, in the place of calibration")
    parser.add_argument("--skip", type=int, default=0, help="rows of the text that such a library has read")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.65])
    parser.add_argument("--rows", type=int, nargs=3, default=[48, 16, 32], help="to calibrate, score, judge")
    parser.add_argument("--context", type=int, default=512, help="tokens of a row")
    parser.add_argument("--every", type=int, default=2, help="scores count one of so many tokens")
    parser.add_argument("--rounds", type=int, default=24, help="of each measurement")
    parser.add_argument("--pair-rounds", type=int, default=16, help="of parent and child in turns")
    parser.add_argument("--tries", type=int, default=5, help="children that are assembled until costs are right")
    parser.add_argument("--metrics", nargs="+", default=["kl", "loss", "local"])
    parser.add_argument("--drawn", type=int, default=10, help="random children")
    parser.add_argument("--context-rounds", type=int, default=0, help="rounds of scores around the child")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", default=result)
    parser.add_argument("--trial", action="store_true", help="marks figures that are too few to be a claim")
    return parser


class Scene:
    """Library, costs and scores of one folder, and what was measured and judged of children."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, folder = options, model_folder(options.model)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        rows = rows_of(TEXT, tokenizer, context=options.context, count=sum(options.rows), skip=options.skip)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed))
        self.calibration, self.scored, self.heldout = rows[order].split(options.rows)
        self.library = self._made(folder)
        self.costs = self._measured()
        self._score()
        self.say("parent measured and judged")
        self.known = Known(
            self.library, SCENARIOS, rounds=options.pair_rounds, heldout=self.heldout, folder=options.folder
        )
        self.costs = calibrated(self.costs, self.known.parent_s, self.library.space.parent)
        self.parent_quality = self.known.quality(self.library, self.library.space.parent)

    def say(self, text: str) -> None:
        """Say how far it is."""
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def _made(self, folder: Path) -> Library:
        if self.options.library is not None:
            library = Library(self.options.library)
            self.key = key_of(library.made_from, str(library.folder))
            return library
        parent = StreamedParent(folder, device=torch.device("cpu"), dtype=torch.float32)
        library = make_library(
            parent,
            self.calibration,
            self.options.folder / "library",
            progress=lambda done, total: self.say(f"library: layer {done} of {total}"),
        )
        self.key = key_of(library.made_from)
        return library

    def _measured(self) -> Costs:
        key = key_of(self.key, [each.label for each in SCENARIOS], torch.get_num_threads(), self.options.rounds)
        journal = Journal(self.options.folder / "costs.jsonl", key)
        timing = Timing(rounds=self.options.rounds)
        self.say("costs")
        return measure_costs(self.library, SCENARIOS, timing, journal=journal)

    def _score(self) -> None:
        """Layers in bf16, the head in float32: five times the speed where the processor has bf16 products."""
        stack = Stack(self.library, dtype=torch.bfloat16)
        settings = Scoring(every=self.options.every, batch_rows=4, seed=self.options.seed)
        self.scoring_judge = Judge(stack, self.scored, every=self.options.every)
        key = key_of(self.key, self.scored.tolist(), str(settings))
        start = time.perf_counter()

        def progress(done: int, total: int) -> None:
            if done % 50 == 0:
                left = (time.perf_counter() - start) / done * (total - done)
                self.say(f"scores: {done} of {total}, {left / 60:.1f} min left")

        journal = Journal(self.options.folder / "scores.jsonl", key)
        self.scores = score(stack, self.scoring_judge, settings, journal=journal, progress=progress)
        self.harm = self.scores.table(self.library.space)
        self.influence = influence(stack, self.scored)
        self.settings = settings

    def ceilings(self, share: float) -> list[Ceiling]:
        """Return the targets at `share` of the parent's latency."""
        return [
            Ceiling(kind="latency", at_most=share * self.known.parent_s[each.label], scenario=each.label)
            for each in SCENARIOS
        ]

    def at(self, share: float) -> dict:
        """Return what the search and every baseline keep at `share` of the parent's latency."""
        ceilings = self.ceilings(share)
        found = {
            metric: self._settled(
                f"puzzle by {metric}",
                lambda costs, metric=metric: (
                    (
                        search(self.library.space, self.scores.table(self.library.space, metric), ceilings, costs)
                    ).architecture
                ),
                ceilings,
            )
            for metric in self.options.metrics
        }
        children = {f"puzzle by {metric}": each for metric, each in found.items()}
        if self.options.context_rounds and found.get("kl") is not None:
            children["puzzle by kl, context rounds"] = self._improved(found["kl"], ceilings)
        for name, make in BASELINES.items():
            children[name] = self._settled(name, lambda costs, make=make: make(self.task(ceilings, costs)), ceilings)
        for number in range(self.options.drawn):
            children[f"drawn {number}"] = self._settled(
                f"drawn {number}", lambda costs, number=number: drawn(self.task(ceilings, costs), number), ceilings
            )
        return self._compared(children)

    def task(self, ceilings: list[Ceiling], costs: Costs) -> Task:
        """Return what baselines are given."""
        return Task(
            space=self.library.space,
            harm=self.harm,
            ceilings=ceilings,
            costs=costs,
            influence=self.influence,
            seed=self.options.seed,
        )

    def _settled(self, name: str, make: Make, ceilings: list[Ceiling]) -> dict | None:
        settled = settle(make, ceilings, self.costs, self.known.seconds, rounds=self.options.tries)
        if settled is None:
            self.say(f"{name}: none")
            return None
        return self._report(name, settled.architecture, settled.measured, settled)

    def _improved(self, start: dict, ceilings: list[Ceiling]) -> dict:
        child = Architecture.from_json(start["architecture"])
        costs = calibrated(self.costs, start["seconds"], child)
        better, rounds = improve(
            self.library,
            child,
            self.scoring_judge,
            ceilings,
            costs,
            self.settings,
            radius=8,
            rounds=self.options.context_rounds,
            dtype=torch.bfloat16,
        )
        told = self._report("context rounds", better, self.known.seconds(better), None)
        return told | {"rounds": [asdict(each) for each in rounds]}

    def _report(self, name: str, child: Architecture, measured: Mapping[str, float], settled: Settled | None) -> dict:
        found = asdict(self.known.quality(self.library, child))
        told = {label: seconds / self.known.parent_s[label] for label, seconds in measured.items()}
        self.say(f"{name}: loss {found['loss']:.4f}, KL {found['kl']:.4f}, {told}")
        return found | {
            "seconds": dict(measured),
            "share of the parent": told,
            "predicted over measured": None
            if settled is None
            else {label: settled.predicted[label] / seconds for label, seconds in measured.items()},
            "children assembled": None if settled is None else settled.tried,
            "parameters": model_parameters(self.library.space, child, self.costs.sizes),
            "layers": [choice.label for choice in child.layers],
            "architecture": child.to_json(),
        }

    def _compared(self, children: dict[str, dict | None]) -> dict:
        """Return the children with the part of each other one's gap that the search by KL avoids."""
        best, parent = children[f"puzzle by {self.options.metrics[0]}"], self.parent_quality.loss
        for child in filter(None, children.values()):
            child.pop("architecture")
            child["gap"] = child["loss"] - parent
            if best is not None and child["gap"] > 0:
                child["gap recovered by puzzle"] = (child["loss"] - best["loss"]) / child["gap"]
        return children


if __name__ == "__main__":
    main()
