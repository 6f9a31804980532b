"""What the knapsack chooses is what pricing every plan one after the other finds the fastest that fits."""

from dataclasses import replace

import pytest

from planish.errors import UsageError
from planish.methods import AdamW, Apollo, Blocked, Checkpoint, Pipelined, Plain
from planish.plan.answer import answer, fewest_devices, plan_tables
from planish.plan.frames import frames
from planish.plan.question import Question
from planish.plan.search import choose, exhaust, search
from planish.price.architectures import find_architecture
from planish.price.config import read_config
from planish.price.hardware import KNOWN, with_memory

GIB = 2**30


def question(name="llama-3.2-1b", *, memory=80, context=8192, rows=8, devices=8, **options):
    hardware = with_memory(KNOWN[options.pop("hardware", "h100")], int(memory * GIB))
    shape = read_config(find_architecture(name))
    return Question(
        shape=shape, dtype="bf16", context=context, rows=rows, devices=devices, hardware=hardware, **options
    )


@pytest.mark.parametrize("memory", [80, 24, 12, 8, 6])
def test_the_knapsack_finds_the_fastest_plan_that_fits(memory):
    for frame in frames(question(memory=memory)):
        found, best = choose(frame), exhaust(frame)
        assert (found is None) == (best is None)
        if best is not None:
            assert found.over() is None
            assert found.time.total_s <= best.time.total_s * 1.01


def test_a_mixture_over_ranks_too():
    asked = question("qwen3-30b-a3b", memory=40, context=16384, rows=8, devices=8, host=64 * GIB)
    for frame in list(frames(asked))[:2]:
        found, best = choose(frame), exhaust(frame)
        assert (found is None) == (best is None)
        if best is not None:
            assert found.time.total_s <= best.time.total_s * 1.01


def test_the_plain_way_wins_where_it_fits():
    found = search(question(memory=2000, devices=1, rows=1, context=1024))
    assert found.fits
    assert isinstance(found.best.plan.vocab, Plain)
    assert isinstance(found.best.plan.boundary, Plain)
    assert isinstance(found.best.plan.optim, AdamW)
    assert found.best.mesh.size == 1


def test_experts_take_fewer_rows_at_a_time_where_only_that_fits():
    asked = question("qwen3-235b-a22b", memory=131, context=23 * 2**20, rows=1, devices=64, hardware="h200")
    found = search(asked)
    assert found.fits
    assert found.best.plan.dispatch.block_rows * 4 <= found.best.batch.tokens
    assert not search(replace(asked, fixed={"dispatch": Pipelined()})).fits


def test_less_memory_never_takes_less_time():
    times = []
    for memory in (200, 60, 40, 30):
        found = search(question("llama-3.1-8b", memory=memory, rows=8))
        assert found.fits
        assert found.best.estimate.peak_bytes <= memory * GIB
        times.append(found.best.time.total_s)
    assert times == sorted(times)


def test_a_host_that_is_too_small_is_kept_to():
    for host in (None, 200 * GIB, 64 * GIB):
        found = search(question("llama-3.1-70b", memory=100, context=65536, rows=8, host=host))
        if found.fits and host is not None:
            assert found.best.node_bytes("host") <= host


def test_over_a_slow_link_goes_what_can_hide_behind_the_layers():
    asked = question("llama-3.1-8b", memory=36, context=2**18, rows=None, degrees={"cp": 8, "replicate": 1})
    slow = replace(asked, hardware=replace(asked.hardware, host_rate=5e8))
    found = search(slow).best
    every = found.plan.boundary.every
    assert every > 1
    assert found.over() is None
    assert found.time.hidden_offload == found.time.offload
    all_go = replace(found, plan=replace(found.plan, boundary=replace(found.plan.boundary, every=1)))
    assert all_go.time.total_s > 1.5 * found.time.total_s
    assert search(asked).best.plan.boundary.every == 1


def test_an_approximate_optimizer_is_named_and_never_chosen():
    asked = question("llama-3.1-8b", memory=24, rows=8)
    found = answer(asked)
    sentence = next(each for each in found.rejected if each.startswith("optim = apollo"))
    assert "approximates AdamW, so it is taken only if named" in sentence
    assert not isinstance(found.best.plan.optim, Apollo)
    named = answer(replace(asked, fixed={"optim": Apollo()}))
    assert isinstance(named.best.plan.optim, Apollo)
    assert not any(each.startswith("optim = apollo") for each in named.rejected)


def test_what_does_not_fit_says_what_would():
    asked = question("llama-3.1-70b", memory=8, host=500 * GIB)
    told = answer(asked)
    assert not told.fits
    assert told.smallest > 8 * GIB
    enough = replace(asked, hardware=with_memory(asked.hardware, told.smallest))
    assert search(enough).fits or enough.host < told.best.node_bytes("host")
    assert fewest_devices(asked) is None or fewest_devices(asked) > 8


def test_the_longest_context_fits():
    asked = question("llama-3.1-8b", memory=40, devices=8, rows=8)
    longest = answer(asked).longest
    assert longest >= asked.context
    assert search(replace(asked, context=longest, rows=1)).fits


def test_named_methods_and_degrees_stay():
    found = search(question("llama-3.1-8b", memory=80, fixed={"boundary": Checkpoint()}, degrees={"cp": 2, "vp": 4}))
    assert found.best.plan.boundary == Checkpoint()
    assert (found.best.mesh.cp, found.best.mesh.vp) == (2, 4)
    assert not isinstance(found.best.plan.vocab, Plain | Blocked)


def test_rows_that_cannot_be_dealt_out_are_refused_with_those_that_can():
    with pytest.raises(UsageError, match=r"do not deal 3 rows out to 8 devices"):
        search(question(rows=3, degrees={"cp": 2}))


def test_degrees_that_do_not_go_together_are_refused_with_those_that_do():
    with pytest.raises(UsageError, match=r"\(8\), `mesh.replicate` \(4\) do not go together on 8 .* one of 1, 2\."):
        search(question(rows=None, degrees={"cp": 8, "replicate": 4}))


def test_the_plan_to_paste_names_every_degree_and_the_bytes_that_are_used():
    asked = question("qwen3-235b-a22b", memory=131, context=2**20, rows=4, devices=64, hardware="h200", host=2048 * GIB)
    tables = plan_tables(search(asked).best)
    assert tables["mesh"]["dp"] == 64
    assert tables["mesh"]["cp"] >= 16
    assert tables["train"]["global_tokens"] == 4 * 2**20
    assert tables["plan"]["dispatch"]["method"] == "pipelined"
