"""Estimates of the built-in model, whose table the package ships: no torch is needed."""

from dataclasses import replace

import pytest

from planish.methods import Checkpoint, Offload, Plain, Plan, Tiled
from planish.plan.estimate import estimate, longest_context
from planish.price.store import preset, table_name
from planish.shapes import BatchShape

BATCH = BatchShape(context=4096)


def table_for(plan, dtype="bf16"):
    return preset("smollm2-135m").read(table_name(plan, dtype=dtype, rows=1))


def peak(plan, batch=BATCH, **options):
    return estimate(table_for(plan), batch, plan, **{"master": True} | options)


def test_categories_add_up_in_every_phase():
    found = peak(Plan())
    assert list(found.phases) == ["init", "forward", "head", "backward", "optimizer", "eval", "save", "resume"]
    for price in found.phases.values():
        assert sum(price.categories.values()) == price.peak_bytes
        assert min(price.categories.values()) > 0
    assert found.peak_bytes == max(price.peak_bytes for price in found.phases.values())


def test_the_dtype_contract_is_in_the_state():
    parameters, found = 134_515_008, peak(Plan())
    assert found.phases["init"].categories["parameters"] == 2 * parameters
    assert 0 < found.phases["init"].categories["optimizer state"] - 12 * parameters < 4096
    pure = peak(Plan(), master=False)
    assert 0 < pure.phases["init"].categories["optimizer state"] - 4 * parameters < 4096


def test_bounding_a_peak_lowers_it():
    plain = Plan.plain()
    assert peak(replace(plain, boundary=Checkpoint())).peak_bytes < peak(plain).peak_bytes
    bounded = replace(plain, vocab=Plan().vocab)
    assert peak(bounded).phases["head"].peak_bytes < peak(plain).phases["head"].peak_bytes
    kept, checkpointed = (peak(Plan(boundary=each)).phases["forward"] for each in (Plain(), Checkpoint()))
    assert "boundaries" not in kept.categories
    assert checkpointed.categories["boundaries"] == 30 * 4096 * 576 * 2


@pytest.mark.parametrize(("dtype", "context"), [("bf16", 8192), ("fp32", 8192), ("bf16", 16384)])
def test_attention_that_is_kept_on_disk_costs_no_peak_and_on_the_device_it_does(dtype, context):
    def at(boundary):
        plan = Plan(boundary=boundary)
        return estimate(table_for(plan, dtype), BatchShape(context=context), plan, master=True).peak_bytes

    disk = 2**40
    checkpointed, kept = at(Checkpoint()), at(Offload(disk=disk, keep_attention=True))
    assert at(Offload(disk=disk)) < kept < checkpointed < at(Checkpoint(keep_attention=True))


def test_networks_in_tiles_hold_no_more_than_a_tile_however_long_the_context():
    """The network alone would hold five arrays of 262,144 tokens x 1,536."""

    def at(activation):
        return peak(Plan(activation=activation), BatchShape(context=2**18)).phases["backward"]

    tiled, plain = at(Tiled()), at(Plain())
    assert plain.peak_bytes - tiled.peak_bytes > 2 * 2**18 * 1536 * 2
    held = {holder.owner: size for holder, size in tiled.owners}
    rows, tiles = 2**18 * 576 * 2, 6 * 64 * 2**20
    assert max(size for owner, size in held.items() if "mlp" in owner) <= 2 * rows < 2**18 * 1536 * 2
    short = {holder.owner: size for holder, size in peak(Plan(activation=Tiled())).phases["backward"].owners}
    assert 0 < short["feed-forward"] <= 4096 * 576 * 2 + tiles + 3 * 576 * 1536 * (4 + 2)


def test_far_memory_lowers_no_peak_that_lies_elsewhere():
    """At 2,048 tokens the peak is in the last layers' backward, where the gradients are and few boundaries."""
    short, long = BatchShape(context=2048), BatchShape(context=16384)
    offload = Plan(boundary=Offload(disk=2**40))
    assert peak(offload, short).peak_bytes >= peak(Plan(), short).peak_bytes
    assert peak(offload, long).peak_bytes < peak(Plan(), long).peak_bytes


def test_accumulation_holds_every_batch_and_the_gradients_in_forward():
    once, thrice = peak(Plan()), peak(Plan(), replace(BATCH, microbatches=3))
    assert thrice.phases["init"].peak_bytes - once.phases["init"].peak_bytes == 2 * 24 * 4096
    assert "gradients" not in once.phases["forward"].categories
    assert thrice.phases["forward"].categories["gradients"] == 2 * 134_515_008


@pytest.mark.parametrize("budget_bytes", [9 * 2**28, 3 * 2**30, 2**36])
def test_the_longest_context_fits_and_one_token_more_does_not(budget_bytes):
    plan = Plan()
    longest = longest_context(table_for(plan), BATCH, plan, master=True, budget_bytes=budget_bytes)
    assert peak(plan, replace(BATCH, context=longest)).peak_bytes <= budget_bytes
    assert peak(plan, replace(BATCH, context=longest + 1)).peak_bytes > budget_bytes


def test_no_context_fits_what_the_state_alone_exceeds():
    plan = Plan()
    assert longest_context(table_for(plan), BATCH, plan, master=True, budget_bytes=2 * 2**30) is None
