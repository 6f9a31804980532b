"""What a rank of a pipeline does in the tests: a small model in float64, its part here, the whole beside it."""

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import ranks as pool
from planish.memory.ledger import Ledger
from planish.methods import Pipeline
from planish.peaks.vocab.blocked import Objective
from planish.peaks.vocab.inputs import Options
from planish.peaks.vocab.shard import Shard, ShardedHead, shard_ranges
from planish.pipeline.actions import Head
from planish.pipeline.choices import generate as make_schedule
from planish.pipeline.run.flow import Flow
from planish.pipeline.run.runner import Parts, PipelineRun, StageLayers
from planish.pipeline.workload import Workload


@dataclass(frozen=True)
class Tokens:
    input_ids: torch.Tensor
    target: torch.Tensor
    num_valid: int


class Layer(nn.Module):
    """Mixes tokens with those before them, then runs a network; counts how often it runs forward."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        y = self.norm(x)
        y = torch.cumsum(self.mix(y), 1) / torch.arange(1, y.shape[1] + 1).view(-1, 1)
        return x + self.down(nn.functional.gelu(self.up(y)))


class Model(nn.Module):
    def __init__(self, *, layers, width, vocab, tied, bias, dtype):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.to(dtype)

    def logits(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_batches(size, *, vocab, rows=2, length=5, ignored=True, seed=1):
    torch.manual_seed(seed)
    batches = []
    for i in range(size):
        ids, target = torch.randint(0, vocab, (rows, length)), torch.randint(0, vocab, (rows, length))
        if ignored:
            target[torch.rand(rows, length) < 0.3] = -100
        if ignored and i == 1:
            target.fill_(-100)  # a microbatch in which nothing counts
        batches.append(Tokens(ids, target, int((target != -100).sum())))
    return batches


def workload(layers, microbatches, ratio=1.0):
    return Workload(layers=layers, microbatches=microbatches, head=ratio)


def make_plan(pipeline, num_ranks, layers, ratio=1.0):
    """Return (microbatches) -> the schedule of `pipeline` over `layers`."""

    def plan(size):
        work = workload(layers, size, ratio)
        spread = work.spread(num_ranks * pipeline.stages_per_rank, Head(pipeline.place))
        costs = work.costs(spread, Head(pipeline.place), num_ranks)
        return make_schedule(pipeline, num_ranks=num_ranks, num_microbatches=size, costs=costs)

    return plan


def run_layers(x, _batch, *, layers, norm, checkpointed):
    for layer in layers:
        keep = checkpointed and torch.is_grad_enabled()
        x = checkpoint(layer, x, use_reentrant=False) if keep else layer(x)
    return x if norm is None else norm(x)


def make_run(group, model, pipeline, *, width, checkpointed=True, objective=None, watch=None, ratio=1.0):
    """Return this rank's part of `model`, its run, and (parameter of the whole, its rows, the part's parameter)."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    plan = make_plan(pipeline, size, len(model.layers), ratio)
    ranks = plan(1).stage_ranks
    counts = workload(len(model.layers), 1).spread(len(ranks), Head(pipeline.place))
    mine = copy.deepcopy(model)
    vocab = model.embedding.num_embeddings
    rows = shard_ranges(vocab, size)[rank]
    table = nn.Parameter(model.embedding.weight.detach()[rows].clone())
    tied = model.head.weight is model.embedding.weight
    head = table if tied else nn.Parameter(model.head.weight.detach()[rows].clone())
    bias = None if model.head.bias is None else nn.Parameter(model.head.bias.detach()[rows].clone())
    pairs = [(model.embedding.weight, rows, table)] + ([] if tied else [(model.head.weight, rows, head)])
    pairs += [] if bias is None else [(model.head.bias, rows, bias)]
    stages, start = [], 0
    for stage, (where, count) in enumerate(zip(ranks, counts, strict=True)):
        last = stage == len(ranks) - 1
        if where == rank:
            layers, norm = mine.layers[start : start + count], mine.norm if last else None
            whole = [*model.layers[start : start + count], *([model.norm] if last else [])]
            for one, part in zip(whole, [*layers, *([norm] if last else [])], strict=True):
                pairs += [(a, slice(None), b) for a, b in zip(one.parameters(), part.parameters(), strict=True)]
            forward = partial(run_layers, layers=layers, norm=norm, checkpointed=checkpointed)
            stages.append(StageLayers(forward=forward, modules=list(layers)))
        start += count
    dtype = model.norm.weight.dtype
    flow = Flow(width=width, dtype=dtype, device=torch.device("cpu"), **({} if watch is None else {"watch": watch}))
    parts = Parts(
        stages=stages,
        embedding=Shard(weight=table, start=rows.start, vocab_size=vocab),
        head=ShardedHead(
            shard=Shard(weight=head, start=rows.start, vocab_size=vocab, bias=bias),
            objective=objective or Objective(),
            options=Options(ignore_index=-100),
        ),
    )
    run = PipelineRun(plan, parts, flow, group=group, vocabulary_group=pool.second_group(group))
    return mine, run, pairs


def draw_model(*, layers, width=6, vocab=11, tied=False, bias=False, dtype=torch.float64):
    torch.manual_seed(0)
    return Model(layers=layers, width=width, vocab=vocab, tied=tied, bias=bias, dtype=dtype)


def worst(pairs):
    """Return the largest difference between a gradient of the whole and its part here, by the whole's largest."""
    errors = [0.0]
    for whole, rows, part in pairs:
        expected = torch.zeros_like(part) if whole.grad is None else whole.grad[rows]
        found = torch.zeros_like(part) if part.grad is None else part.grad
        if found.numel():
            errors.append(float((expected - found).abs().max() / max(1.0, float(expected.abs().max()))))
    return max(errors)


def against_one_process(
    group, *, method, head, sizes, layers=8, vocab=11, tied=False, bias=False, objective=None, checkpointed=True
):
    """Run steps of `sizes` microbatches whose gradients add up; return the largest error of loss and gradient."""
    torch.set_num_threads(1)
    model = draw_model(layers=layers, vocab=vocab, tied=tied, bias=bias)
    objective = Objective() if objective is None else Objective(**objective)
    pipeline = Pipeline(method=method, head=head)
    mine, run, pairs = make_run(group, model, pipeline, width=6, checkpointed=checkpointed, objective=objective)
    error, used = 0.0, 0
    for number, size in enumerate(sizes):
        batches = make_batches(size, vocab=vocab, seed=number)
        total = sum(batch.num_valid for batch in batches)
        found = run.step(batches, upstream=1 / max(1, total))
        expected = torch.stack([sum_of_losses(model, batch, objective) for batch in batches])
        (expected.sum() / max(1, total)).backward()
        error = max(error, float((expected.detach() - found).abs().max()), worst(pairs))
        used += size
        held_out = run.losses(batches)
        error = max(error, float((expected.detach() - held_out).abs().max()))
    runs = [layer.runs for layer in mine.layers]
    return {"error": error, "runs": runs, "used": used, "losses": found.tolist()}


def sum_of_losses(model, batch, objective):
    logits = model.logits(batch.input_ids).flatten(0, 1)
    logp, keep = logits.log_softmax(-1), batch.target.flatten() != -100
    nll = -logp.gather(1, batch.target.flatten().clamp(min=0).unsqueeze(1)).squeeze(1)
    smooth, z = objective.label_smoothing, objective.z_loss
    loss = (1 - smooth) * nll + smooth * -logp.mean(-1) + z * logits.logsumexp(-1).square()
    return loss[keep].sum()


def generate(group, *, method, head, tied):
    """Return what the pipeline and the whole model say after a prompt, greedily."""
    torch.set_num_threads(1)
    model = draw_model(layers=8, tied=tied)
    _, run, _ = make_run(group, model, Pipeline(method=method, head=head), width=6)
    ids = whole = torch.tensor([[3, 1, 4], [1, 5, 9]])
    for _ in range(6):
        (likely,) = run.most_likely([Tokens(ids, torch.full_like(ids, -100), 0)])
        ids = torch.cat([ids, likely[:, -1:]], 1)
        with torch.no_grad():
            whole = torch.cat([whole, model.logits(whole)[:, -1:].argmax(-1)], 1)
    return ids.tolist(), whole.tolist()


def live_bytes(group, *, method, head, sizes, checkpointed=True):
    """Return for each number of microbatches the most bytes alive in a step, and what is alive after it."""
    torch.set_num_threads(1)
    model = draw_model(layers=8, width=32, vocab=64)
    _, run, _ = make_run(group, model, Pipeline(method=method, head=head), width=32, checkpointed=checkpointed)
    run.step(make_batches(1, vocab=64, rows=2, length=16), upstream=1.0)  # gradients exist from here on
    found = []
    for size in sizes:
        batches = (
            make_batches(1, vocab=64, rows=2, length=16, ignored=False) * size
        )  # each rank has as many rows of all
        with Ledger() as ledger:
            with ledger.phase("forward"):
                run.step(batches, upstream=1.0)
            memory = ledger.end_step()
        found.append((memory.peak_bytes, ledger.live_bytes))
    return found


def other_plan(group):
    """Return the error of a run in which rank 1 plans otherwise."""
    model = draw_model(layers=4)
    rank = dist.get_rank(group)
    _, run, _ = make_run(group, model, Pipeline(head="vocab-2"), width=6, ratio=5.0 if rank == 1 else 0.2)
    try:
        run.step(make_batches(5, vocab=11), upstream=1.0)
    except Exception as error:
        return type(error).__name__, str(error)


def passes_seen(group, *, method, head, microbatches):
    """Return the passes that were watched, and those that the schedule names for this rank."""
    seen = []

    def watch(action):
        seen.append(str(action))
        return nullcontext()

    model = draw_model(layers=8)
    pipeline = Pipeline(method=method, head=head)
    _, run, _ = make_run(group, model, pipeline, width=6, watch=watch)
    run.step(make_batches(microbatches, vocab=11), upstream=1.0)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    named = make_plan(pipeline, ranks, 8)(microbatches).passes().ranks[rank]
    return seen, [str(each) for each in named]
