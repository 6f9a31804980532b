"""The record of a step as data and as text."""

import json

import torch

from planish.memory.book import Record
from planish.memory.ledger import Ledger
from planish.memory.report import format_table, largest_holders, sum_by_category


def record(nbytes, owner, category="layer working set", shape=(4, 2), dtype=torch.bfloat16):
    return Record(nbytes, category, owner, torch.Size(shape), dtype, 1)


def test_layers_that_hold_the_same_are_taken_together():
    records = [record(100, f"model.layers.{layer}.mlp.experts.{layer + 3}.up_proj") for layer in range(12)]
    records.append(record(300, "model.layers.3.mlp"))
    held = largest_holders(records)
    assert [(each.owner, each.count, each.total_bytes) for each in held] == [
        ("model.layers.*.mlp.experts.*.up_proj", 12, 1200),
        ("model.layers.3.mlp", 1, 300),
    ]
    assert (held[0].shape, held[0].dtype) == ((4, 2), "bfloat16")


def test_numbers_inside_names_are_not_layers():
    held = largest_holders([record(1, "layer1.w2"), record(1, "layer2.w2")])
    assert sorted(each.owner for each in held) == ["layer1.w2", "layer2.w2"]


def test_holders_differ_by_category_shape_and_dtype_and_are_limited():
    records = [
        record(8, "a"),
        record(8, "a", category="boundaries"),
        record(8, "a", shape=(8,)),
        record(8, "a", dtype=torch.float32),
        record(0, "b"),
    ]
    assert len(largest_holders(records)) == 4
    assert len(largest_holders(records, limit=2)) == 2


def test_the_table_adds_up_and_names_the_rest():
    records = [record(2**20 * (30 - index), f"owner{index}") for index in range(25)]
    table = format_table(sum_by_category(records), largest_holders(records))
    lines = [line.split() for line in table.splitlines()]
    assert lines[0] == ["bytes", "alive", "450.0", "MiB"] or lines[0] == ["bytes", "alive", "0.44", "GiB"]
    assert lines[1][:3] == ["layer", "working", "set"]
    assert lines[3][0] == "owner0"
    assert lines[-1][:2] == ["all", "others"]
    assert lines[-1][2:] == ["40.0", "MiB"]


def test_a_step_is_plain_data():
    with Ledger() as ledger:
        ledger.start_step(3)
        with ledger.phase("forward"):
            kept = [torch.zeros(100), torch.zeros(3, 5, dtype=torch.int64)]
        with ledger.phase("save"):
            torch.zeros(1000)
        memory = ledger.end_step()
    del kept
    tree = json.loads(json.dumps(memory.to_dict()))
    assert (tree["step"], tree["peak_bytes"], tree["peak_phase"]) == (3, 4520, "save")
    assert list(tree["phases"]) == ["forward", "save"]
    assert tree["phases"]["save"]["categories"] == {"layer working set": 520, "staging": 4000}
    assert tree["phases"]["save"]["owners"] == [
        ["save", "staging", [1000], "float32", 1, 4000],
        ["forward", "layer working set", [100], "float32", 1, 400],
        ["forward", "layer working set", [3, 5], "int64", 1, 120],
    ]
    assert [nbytes for _, nbytes, _ in tree["timeline"]] == [0, 400, 520, 520, 520, 4520, 520]
    assert tree["timeline"][5][2] == "save"
