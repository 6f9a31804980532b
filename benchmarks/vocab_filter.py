"""Claim: on a real model's logits the gradient filter skips most products, and training does not feel it.

Two parts, either alone by `--part`. `logits`: the head of SmolLM2-135M on English, its hidden states and targets as
they are; which part of the derivatives is skipped, CPU seconds of forward and backward against the exact head, and the
error of both gradients against float64. `curve`: the same model trained on English, a row a step, exact and filtered;
its losses, and its loss on text that none saw. Each variant's losses are kept in `--folder` when it is done, so that a
run that was cut short goes on with the next.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import planish
from harness import Times, interleave, write_result
from planish.models.builtin import model_folder
from planish.peaks.vocab.filter import GradientFilter
from planish.peaks.vocab.losses import linear_cross_entropy

MODEL = "smollm2-135m"
ENGLISH = Path(planish.__file__).parent / "data" / "english.txt"
SEED = 0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXACT_ROWS = 128
HELD_OUT = 8

Draw = Callable[[], GradientFilter | None]
VARIANTS: dict[str, Draw] = {
    "exact": lambda: None,
    "filtered": GradientFilter,
    "filtered, brought together": lambda: GradientFilter(ordered=True),
    "filtered, weight too": lambda: GradientFilter(weight=True),
}


def load() -> tuple[PreTrainedModel, Tensor]:
    """Return the model in float32 and the English text as ids."""
    folder = model_folder(MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(folder)(ENGLISH.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    return model, torch.tensor(ids)


def head_of(model: PreTrainedModel, ids: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weight and targets of the first `tokens` tokens, in rows of 512."""
    rows = ids[: tokens + 1]
    with torch.no_grad():
        parts = [model.model(input_ids=part[None]).last_hidden_state[0] for part in rows[:-1].split(512)]
    return torch.cat(parts), model.lm_head.weight.detach(), rows[1:]


def exact_gradients(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the mean loss in float64, some rows of full logits at a time."""
    wide = weight.double()
    d_hidden, d_weight = torch.zeros(hidden.shape, dtype=torch.float64), torch.zeros_like(wide)
    for rows in range(0, len(hidden), EXACT_ROWS):
        part = hidden[rows : rows + EXACT_ROWS].double()
        grad = torch.softmax(part @ wide.t(), 1)
        grad[torch.arange(len(part)), target[rows : rows + EXACT_ROWS]] -= 1
        grad /= len(hidden)
        d_hidden[rows : rows + EXACT_ROWS] = grad @ wide
        d_weight += grad.t() @ part
    return d_hidden, d_weight


def measure_logits(options: argparse.Namespace) -> dict[str, object]:
    """Return skipped parts, times and errors of every variant."""
    model, ids = load()
    figures: dict[str, object] = {}
    for dtype in options.dtype:
        hidden, weight, target = head_of(model, ids, options.tokens)
        hidden, weight = (each.to(DTYPES[dtype]).requires_grad_() for each in (hidden, weight))
        exact = exact_gradients(hidden.detach(), weight.detach(), target)
        for strategy in ("gradients-in-forward", "recompute"):
            figures[f"{dtype}, {strategy}"] = _compare((hidden, weight, target), exact, strategy, options.rounds)
    return figures


def _compare(
    operands: tuple[Tensor, Tensor, Tensor], exact: tuple[Tensor, Tensor], strategy: str, rounds: int
) -> dict[str, object]:
    """Return the figures of every variant in one dtype by one strategy."""
    hidden, weight, _ = operands
    filters = {name: draw() for name, draw in VARIANTS.items()}

    def step(name: str) -> None:
        hidden.grad = weight.grad = None
        linear_cross_entropy(*operands, strategy=strategy, gradient_filter=filters[name]).backward()

    found = {}
    for name, each in filters.items():
        step(name)
        errors = [
            float((grad.double() - true).norm() / true.norm())
            for grad, true in zip((hidden.grad, weight.grad), exact, strict=True)
        ]
        untouched = int((~weight.grad.any(1)).sum())
        part = 0.0 if each is None else each.skipped_fraction
        found[name] = {"skipped": part, "errors": errors, "weight_rows_of_zeros": untouched}
    times: dict[str, Times] = interleave({name: lambda name=name: step(name) for name in filters}, rounds)
    for name, each in times.items():
        found[name]["times"] = each.summary()
        print(f"{strategy:22s}{name:28s}{min(each.cpu_s):8.3f} s  {found[name]}", flush=True)
    return found


def train(name: str, options: argparse.Namespace) -> dict[str, object]:
    """Return every step's loss of one variant, and its loss on held-out rows."""
    torch.manual_seed(SEED)
    model, ids = load()
    rows = ids[: len(ids) // (options.context + 1) * (options.context + 1)].view(-1, options.context + 1)
    held_out, rows = rows[-HELD_OUT:], rows[:-HELD_OUT]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    gradient_filter, losses, begun = VARIANTS[name](), [], time.perf_counter()
    for step in range(options.steps):
        row = rows[step % len(rows)]
        hidden = model.model(input_ids=row[None, :-1]).last_hidden_state[0]
        loss = linear_cross_entropy(hidden, model.lm_head.weight, row[1:], gradient_filter=gradient_filter)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        hidden = model.model(input_ids=held_out[:, :-1]).last_hidden_state
        final = linear_cross_entropy(hidden, model.lm_head.weight, held_out[:, 1:]).item()
    part = 0.0 if gradient_filter is None else gradient_filter.skipped_fraction
    taken = time.perf_counter() - begun
    return {"loss": losses, "held_out": final, "skipped": part, "wall_s": taken}


def measure_curve(options: argparse.Namespace) -> dict[str, object]:
    """Return the curves of every variant, those that an earlier run left in the folder as they are."""
    options.folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in options.curves:
        path = options.folder / f"{name.replace(', ', '-').replace(' ', '-')}-{options.steps}x{options.context}.json"
        if not path.is_file():
            path.write_text(json.dumps(train(name, options)), encoding="utf-8")
        found[name] = json.loads(path.read_text(encoding="utf-8"))
        print(f"{name:28s} held out {found[name]['held_out']:.4f}, skipped {found[name]['skipped']:.3f}", flush=True)
    exact = found["exact"]["loss"]
    for each in found.values():
        each["largest_difference"] = max(abs(a - b) for a, b in zip(each["loss"], exact, strict=True))
    return found


def main() -> None:
    """Measure what is asked for and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=["logits", "curve"], nargs="+", default=["logits", "curve"])
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--curves", choices=VARIANTS, nargs="+", default=list(VARIANTS), help="a quarter hour each")
    parser.add_argument("--folder", type=Path, default=Path("runs/vocab_filter"))
    options = parser.parse_args()
    if "exact" not in options.curves:
        parser.error("--curves needs `exact` among them: the others are compared with it.")
    torch.set_num_threads(1)
    for part in options.part:
        figures = measure_logits(options) if part == "logits" else measure_curve(options)
        print(write_result(f"vocab_filter_{part}", figures, seed=SEED))


if __name__ == "__main__":
    main()
