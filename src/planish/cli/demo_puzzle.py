"""`planish demo puzzle`: SmolLM2-135M, the best baseline and a searched child at equal measured latency, untrained."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from planish.cli.say import say
from planish.errors import VerificationFailed

if TYPE_CHECKING:
    from planish.compress.order import Order
    from planish.compress.outcome import Outcome

MODEL = "smollm2-135m"
_SHARE = 0.8


def show() -> None:
    """Search a child of SmolLM2-135M on a little text, and print what it and the best baseline keep."""
    import torch

    from planish.compress.job import Job
    from planish.models.builtin import model_folder
    from planish.models.load import load_tokenizer
    from planish.sections import ModelSection

    with tempfile.TemporaryDirectory() as name:
        order = order_of(Path(name))
        say(
            f"SmolLM2-135M on English: what it keeps in {_SHARE:.0%} of its time where each layer may lose its "
            "attention and half or all of its network. Nothing is trained."
        )
        tokenizer = load_tokenizer(ModelSection(from_=order.model))
        job = Job(order, model_folder(order.model), tokenizer, torch.float32, lambda text: say(f"   {text}"))
        _tell(job.run())


def order_of(folder: Path) -> "Order":
    """Return what is asked for: one scenario, few options, little text."""
    from planish.compress.calibrate import Calibration
    from planish.compress.order import Order, Target, parse_scenario
    from planish.compress.space import Menu
    from planish.price.processor import has_products

    scenario = parse_scenario("1x256", "decode")
    return Order(
        model=MODEL,
        text=("builtin:english",),
        out=folder,
        scenarios=(scenario,),
        targets=(Target(kind="latency", scenario=scenario.label, share=_SHARE),),
        rows=(8, 2, 8),
        context=128,
        joint=0.0,
        rounds=8,
        menu=Menu(kv_heads=(), widths=(0.5,), linear=False),
        calibration=Calibration(orders=("contribution",), ridges=(0.1,)),
        bf16_scores=has_products("bfloat16"),
        baselines=("greedy", "depth drop", "uniform width"),
    )


def _tell(outcome: "Outcome") -> None:
    """Print the parent, the best baseline and the child; a search that is no better has failed."""
    parent, child = outcome.parent, outcome.child
    best = min(outcome.baselines, key=lambda each: each.quality.loss)
    label = outcome.order.scenarios[0].label
    say(f"\n   {'':<24}{label:>16}{'loss':>9}{'KL':>9}{'same first choice':>20}")
    for title, each in (("parent", parent), (f"best baseline: {best.name}", best), ("child", child)):
        share, found = each.measured[label] / parent.measured[label], each.quality
        say(f"   {title:<24}{share:>16.1%}{found.loss:>9.3f}{found.kl:>9.3f}{found.agreement:>20.1%}")
    lost, theirs = (each.quality.loss - parent.quality.loss for each in (child, best))
    say(f"\n   layers of the child: {' '.join(choice.label for choice in child.architecture.layers)}")
    say(f"   it loses {lost:.3f} nats where the best of {len(outcome.baselines)} baselines loses {theirs:.3f}")
    if lost >= theirs:
        raise VerificationFailed(
            "the search found nothing better than a baseline; the machine was not steady, run it again."
        )
