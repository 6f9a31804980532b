"""SmolLM2-135M at a share of its CPU latency after global distillation: what lessons leave of each child's gap.

Library, costs and scores are those of `benchmarks/puzzle.py` in the same `--folder`, made there or here, once. At each
share the child of the search, depth drop and the best other baseline, all at equal measured latency, have the same
lessons: as many tokens, in the same order, of text that nothing else has read. The gap is the loss that a child adds to
its parent's; recovered is the part of a baseline's gap that the search avoids, before lessons and after them. Then the
losses: of the lessons (divergence, cosine, next token, and together), and of blocks that are trained alone before the
child is assembled from them. Everything is kept as it is found, so that an interrupted run goes on.
"""

import argparse
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness import write_result
from planish.cli.lessons import read_lessons
from planish.compress.baselines import BASELINES
from planish.compress.distil import distil
from planish.compress.journal import Journal, key_of
from planish.compress.judge import Whole
from planish.compress.library import Library
from planish.compress.likely import block_names, likely
from planish.compress.order import Order
from planish.compress.parent import StreamedParent
from planish.compress.pupil import Distillation
from planish.compress.realise import assemble
from planish.compress.school import School
from planish.compress.scores import local_table
from planish.compress.search import search
from planish.compress.settle import Settled, settle
from planish.compress.space import Architecture
from planish.models.builtin import model_folder
from puzzle import SCENARIOS, TEXT, Scene, parser

LESSONS = {
    "KL + cosine": {},
    "KL": {"cosine": 0.0},
    "cosine": {"kl": 0.0},
    "LM": {"kl": 0.0, "cosine": 0.0, "lm": 1.0},
    "KL + cosine + LM": {"lm": 1.0},
}
BLOCK_LOSSES = ("plain", "normalised", "batched", "vectorwise")
PROMPT_TOKENS = 128


def main() -> None:
    """Run every stage that is not there yet and write the figures."""
    options = _options()
    torch.manual_seed(options.seed)
    bench = _Bench(options, Scene(options))
    figures = {
        "model": options.model,
        "trial": options.trial,
        "tokens of lessons": options.tokens,
        "parent": asdict(bench.scene.parent_quality) | {"seconds": bench.scene.known.parent_s},
        "shares": {f"{share:g}": bench.at(share) for share in options.shares},
    }
    print(write_result(options.result, figures, seed=options.seed))


def _options() -> argparse.Namespace:
    made = parser(__doc__, result="puzzle_distil")
    made.add_argument("--tokens", default="256K", help="that each child learns from")
    made.add_argument("--lr", type=float, default=3e-4)
    made.add_argument("--step-rows", type=int, default=8)
    made.add_argument("--seeds", type=int, nargs="+", default=[0], help="orders of the text of the lessons")
    made.add_argument("--ablate", type=float, help="share at which losses are compared; default: none")
    made.add_argument("--block-steps", type=int, default=60)
    made.add_argument("--generated", type=int, default=64, help="tokens that parent and child decode for their speed")
    return made.parse_args()


class _Bench:
    def __init__(self, options: argparse.Namespace, scene: Scene) -> None:
        self.options, self.scene = options, scene
        self.parent = model_folder(options.model)
        self.tokenizer = AutoTokenizer.from_pretrained(self.parent, local_files_only=True)
        asked = scene.library.made_from, scene.heldout.tolist(), options.tokens, options.lr, options.step_rows
        self.taught = Journal(options.folder / "taught.jsonl", key_of(*asked))

    def at(self, share: float) -> dict[str, Any]:
        """Return what children of `share` keep before and after their lessons."""
        children = self._children(share)
        found = {
            name: {
                "before": self._gap(asdict(self.scene.known.quality(self.scene.library, child.architecture))),
                "after": {seed: self._gap(self._learned(child.architecture, seed)) for seed in self.options.seeds},
                "share of the parent": {
                    label: seconds / self.scene.known.parent_s[label] for label, seconds in child.measured.items()
                },
                "tokens/s of generate": self._speed(child.architecture),
                "layers": [choice.label for choice in child.architecture.layers],
            }
            for name, child in children.items()
        }
        best = found["puzzle"]
        for each in found.values():
            each["recovered by puzzle"] = {
                "before": _recovered(best["before"], each["before"]),
                "after": {seed: _recovered(best["after"][seed], each["after"][seed]) for seed in self.options.seeds},
            }
        figures: dict[str, Any] = {
            "children": found,
            "tokens/s of generate by the parent": self._speed(self.scene.library.space.parent),
        }
        if share == self.options.ablate:
            child = children["puzzle"].architecture
            figures["losses of the lessons"] = {
                name: self._gap(self._learned(child, self.options.seeds[0], name)) for name in LESSONS
            }
            figures["losses of blocks"] = {
                loss: self._gap(self._of_blocks(child, loss, share)) for loss in BLOCK_LOSSES
            }
        return figures

    def _children(self, share: float) -> dict[str, Settled]:
        """Return the search's child, depth drop's, and the best other baseline's before lessons."""
        scene, ceilings = self.scene, self.scene.ceilings(share)
        makes = {"puzzle": lambda costs: search(scene.library.space, scene.harm, ceilings, costs).architecture}
        for name, make in BASELINES.items():
            makes[name] = lambda costs, make=make: make(scene.task(ceilings, costs))
        found = {}
        for name, make in makes.items():
            settled = settle(make, ceilings, scene.costs, scene.known.seconds, rounds=self.options.tries)
            scene.say(f"{share:g} {name}: {'none' if settled is None else 'settled'}")
            if settled is not None:
                found[name] = settled
        others = {name: each for name, each in found.items() if name not in ("puzzle", "depth drop")}
        losses = {name: scene.known.quality(scene.library, each.architecture).loss for name, each in others.items()}
        kept = {"puzzle", "depth drop", min(losses, key=losses.__getitem__)} if losses else {"puzzle", "depth drop"}
        return {name: each for name, each in found.items() if name in kept}

    def _learned(self, child: Architecture, seed: int, losses: str = "KL + cosine") -> dict[str, float]:
        """Return a child's quality after its lessons; the run's folder goes once it is known."""
        name = key_of(child.to_tree(), seed, losses)
        if name not in self.taught:
            folder, _ = self._school(seed, losses).taught(self.scene.library, child)
            model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
            found = self.scene.known.quality_as(f"{name} {folder.parent.parent.name}", lambda: Whole(model))
            self.taught.put(name, asdict(found))
            shutil.rmtree(folder.parent.parent)
        return self.taught[name]

    def _school(self, seed: int, losses: str) -> School:
        options = self.options
        settings = [(f"distil.{name}", value) for name, value in LESSONS[losses].items()]
        settings += [("train.lr", options.lr), ("train.global_tokens", options.step_rows * options.context)]
        lessons = read_lessons(
            settings,
            tokens=options.tokens,
            model=str(self.parent),
            text=TEXT,
            context=options.context,
            dtype="fp32",
            seed=seed,
            tournament=None,
        )
        assert lessons is not None
        order = Order(
            model=options.model,
            text=TEXT,
            out=options.folder,
            scenarios=SCENARIOS,
            targets=(),
            rows=(options.skip + options.rows[0], options.rows[1], options.rows[2]),
            context=options.context,
            lessons=lessons,
        )
        return School(order, lessons, self.parent, self.tokenizer, self.scene.say)

    def _of_blocks(self, child: Architecture, loss: str, share: float) -> dict[str, float]:
        """Return a child's quality whose blocks were trained alone with `loss`, before any lesson."""
        scene, options = self.scene, self.options
        settings = replace(Distillation(steps=options.block_steps, seed=options.seed), loss=loss)
        choices = likely(scene.library.space, local_table(scene.library), scene.ceilings(share), scene.costs)
        names = block_names(scene.library.space, choices)
        names |= block_names(scene.library.space, [[choice] for choice in child.layers])
        trained = Library.create(
            options.folder / f"library-{loss}",
            config=scene.library.config,
            space=scene.library.space,
            made_from=key_of(scene.library.made_from, asdict(settings), sorted(names)),
        )
        parent = StreamedParent(self.parent, device=torch.device("cpu"), dtype=torch.float32)

        def progress(done: int, total: int) -> None:
            scene.say(f"blocks by {loss}: layer {done} of {total}")

        rows = scene.calibration
        distil(parent, rows, scene.library, trained, settings, chosen=names.__contains__, progress=progress)
        return asdict(scene.known.quality(trained, child))

    def _gap(self, found: Mapping[str, float]) -> dict[str, float]:
        return dict(found) | {"gap": found["loss"] - self.scene.parent_quality.loss}

    @torch.no_grad()
    def _speed(self, child: Architecture) -> float:
        """Return the tokens that a model of these layers decodes in a second by `generate`, the best of three."""
        name = key_of("generate", child.to_tree(), self.options.generated)
        if name not in self.taught:
            model = assemble(self.scene.library, child)
            ids, best = self.scene.heldout[:1, :PROMPT_TOKENS], 0.0
            call = {"do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
            for _ in range(3):
                times = []
                for count in (1, 1 + self.options.generated):
                    start = time.perf_counter()
                    model.generate(input_ids=ids, min_new_tokens=count, max_new_tokens=count, **call)
                    times.append(time.perf_counter() - start)
                best = max(best, self.options.generated / (times[1] - times[0]))
            self.taught.put(name, best)
        return self.taught[name]


def _recovered(best: Mapping[str, float], other: Mapping[str, float]) -> float | None:
    """Return the part of another child's gap that the search's child avoids."""
    return (other["loss"] - best["loss"]) / other["gap"] if other["gap"] > 0 else None


if __name__ == "__main__":
    main()
