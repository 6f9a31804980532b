"""Stages are one more degree: what is chosen is the best of all, and what is pasted is what was priced."""

from dataclasses import replace

import pytest

from planish.decode import decode
from planish.methods import Blocked, Checkpoint, Pipeline, Plain, Plan, Ring, StreamAdamW
from planish.pipeline.outline import outcome
from planish.pipeline.workload import workload
from planish.plan.answer import answer, plan_tables
from planish.plan.frames import frames
from planish.plan.question import Candidate, Question
from planish.plan.search import choose, exhaust, search
from planish.price.architectures import find_architecture
from planish.price.config import read_config
from planish.price.hardware import KNOWN, with_memory
from planish.runfile import RunFile
from planish.shapes import MeshShape
from planish.train.predict import predict
from planish.train.stage_plan import price_of_stages

MIB = 2**20
CONFIG = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "hidden_act": "silu"}


def question(*, memory=1024, rows=16, devices=4, network=1e7, **options):
    """Return a question about a small model whose devices lie far apart, so that gathering weights takes long."""
    hardware = replace(KNOWN["rtx4090"], link_rate=network, network_rate=network)
    shape = read_config(CONFIG)
    return Question(
        shape=shape,
        dtype="bf16",
        context=256,
        rows=rows,
        devices=devices,
        hardware=with_memory(hardware, memory * MIB),
        stages=price_of_stages(shape, CONFIG),
        **options,
    )


def rank(candidate):
    return candidate.time.total_s / candidate.tokens_per_step


@pytest.mark.parametrize("memory", [1024, 40])
def test_the_answer_is_the_best_of_all_frames(memory):
    asked = question(memory=memory, degrees={"cp": 1})
    found = search(asked)
    every = [exhaust(frame) for frame in frames(asked)]
    assert {frame.pp for frame in frames(asked)} == {1, 2, 4}
    best = min((each for each in every if each is not None), key=rank)
    assert found.fits
    assert found.best.over() is None
    assert rank(found.best) <= rank(best) * 1.001


def test_the_knapsack_sees_stages():
    for frame in frames(question(memory=48, degrees={"pp": 2, "cp": 1})):
        found, best = choose(frame), exhaust(frame)
        assert (found is None) == (best is None)
        if best is not None:
            assert rank(found) <= rank(best) * 1.001


def test_stages_are_taken_where_gathering_takes_long_and_not_where_it_hides():
    slow, fast = question(), question(network=1e12)
    assert search(slow).best.mesh.pp > 1
    told = answer(fast)
    assert told.best.mesh.pp == 1
    assert any(each.startswith("mesh.pp = 2: ") and "each rank waits 1 of" in each for each in told.rejected)


def test_one_microbatch_is_no_pipeline():
    assert search(question(rows=None, network=1e12)).best.mesh.pp == 1


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 16), (8, 32)])
def test_turns_take_what_the_simulator_says(pp, microbatches):
    asked = question(devices=pp, network=1e15)
    time = Candidate(asked, MeshShape(pp=pp), 1, microbatches, Plan(vocab=Blocked(), boundary=Checkpoint())).time
    work = workload(asked.shape, context=256, microbatches=microbatches, recompute=True)
    simulated = outcome(Pipeline(), replace(work, transfer=0.0, embedding=0.0), pp).timeline
    longer = (time.compute + time.turns) / time.compute
    assert longer == pytest.approx(simulated.makespan / max(simulated.busy), rel=0.1)


def test_what_is_pasted_is_what_was_priced():
    tree = find_architecture("smollm2-135m")
    shape = read_config(tree)
    fixed = {"boundary": Checkpoint(), "activation": Plain()}
    asked = question(degrees={"pp": 2}, devices=2, fixed=fixed, memory=2**16)
    best = search(replace(asked, shape=shape, stages=price_of_stages(shape, tree))).best
    tables = plan_tables(best) | {"model": {"from": "smollm2-135m", "dtype": "bf16"}}
    tables["data"] |= {"train": "builtin:english", "eval": "builtin:english"}
    run = decode(RunFile, tables)
    assert run.mesh.size == 2
    found = predict(run, lambda _: None).estimate
    for phase, price in best.estimate.phases.items():
        if phase != "init":  # what rank 0 loads is told apart
            assert found.phases[phase].peak_bytes == price.peak_bytes, phase
    assert found.ranks[1] == best.estimate.ranks[1]


@pytest.mark.parametrize(
    "fixed", [{"vocab": Ring()}, {"boundary": Plain()}, {"optim": StreamAdamW(host=2**40)}, {"vocab": Plain()}]
)
def test_methods_without_a_price_on_stages_are_not_put_there(fixed):
    assert {frame.pp for frame in frames(question(fixed=fixed))} == {1}


def test_uneven_and_scaled_models_have_no_stages():
    assert price_of_stages(read_config(CONFIG | {"model_type": "granite"}), CONFIG | {"model_type": "granite"}) is None
    assert any("have no price here" in each for each in answer(replace(question(), stages=None)).rejected)
