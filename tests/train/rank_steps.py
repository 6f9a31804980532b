"""What each rank does in the tests of training over ranks."""

import dataclasses
from contextlib import ExitStack

import torch

from planish.memory.ledger import Ledger
from planish.memory.meter import ProcessMeter
from planish.train.engine import build_engine
from planish.train.evaluate import evaluate
from planish.train.facts import MeasuredFacts
from planish.train.job import Job, RankFeed, build, build_optimizer, held_out_batches, open_run_feed
from planish.train.loop import train_step
from planish.train.run_folder import follow_run_folder, open_run_folder
from planish.train.session import _resume, run_training
from planish.train.spread import reduced


def train_in_float64(run, model, tokenizer, world):
    """Return losses, gradient norms and all weights after the run's steps, by the very step that trains.

    With held-out data its loss after them comes last.
    """
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, dtype="bf16-pure"))  # no fp32 master
    with ExitStack() as scope:
        ledger, rows = scope.enter_context(Ledger()), run.rows_per_microbatch
        tokens = run.tokens_per_microbatch
        engine = build_engine(
            lambda: model, run.plan, tokens=tokens, ledger=ledger, facts=MeasuredFacts(), scope=scope, world=world
        )
        reader, readers = world.reader
        feed = RankFeed(open_run_feed(run, tokenizer, rows=rows * readers), rank=reader, rows=rows, place=world.place)
        optimizer = build_optimizer(engine, run, scope)
        job = Job(run=run, tokenizer=None, engine=engine, optimizer=optimizer, feed=feed, eval_batches=list)
        reports = [train_step(job, step) for step in range(1, run.train.steps + 1)]
        numbers = [(each.loss, each.grad_norm, each.num_valid, each.num_tokens) for each in reports]
        if run.data.eval:
            held_out = evaluate(engine, held_out_batches(run, tokenizer, world))
            numbers.append((held_out.loss, held_out.bits_per_byte, held_out.num_valid))
        state = model.state_dict()
        weights = {name: reduced(state[name]) for name, _ in model.named_parameters()}
    return numbers, weights


def train_and_save(run, world):
    class Silent:
        def begin(self, *_):
            pass

        step = evaluated = note = begin

    path, resume = run.save.dir, (run.save.dir / "run.toml").exists()
    opened = open_run_folder(path, resume=resume, overwrite=False) if world.leads else None
    with opened or follow_run_folder(path, resume=resume) as folder:
        run_training(run, folder, Silent(), ProcessMeter(torch.device("cpu")), world)


def next_losses(run, world, *, held_out=True):
    """Return the losses of the two steps after the newest checkpoint, and the held-out loss before them."""

    class Silent:
        def note(self, _):
            pass

    with ExitStack() as scope:
        job = build(run, scope.enter_context(Ledger()), scope, world)
        first = _resume(job, follow_run_folder(run.save.dir, resume=True), Silent())
        assert first == 4
        before = [evaluate(job.engine, job.eval_batches()).loss] if held_out else []
        return *before, *(train_step(job, step).loss for step in (4, 5))
