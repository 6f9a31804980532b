"""The settings of the feed in a run file."""

import dataclasses

import pytest

from planish.cli.settings import describe_settings
from planish.decode import decode
from planish.errors import UsageError
from planish.sections import DataSection


def test_weights_are_one_positive_number_for_each_entry():
    section = decode(DataSection, {"train": ["a.txt", "b.txt"], "weights": [3, 0.5]}, "data")
    assert section.weights == (3.0, 0.5)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"train": []}, "`data.train` must name at least one source"),
        ({"train": ["a"], "weights": [1, 2]}, "`data.weights` must have one number for each of the 1 entries of"),
        ({"train": ["a", "b"], "weights": [1, 0]}, r"`data.weights` must be above 0 and finite, got \[1.0, 0.0\]"),
        (
            {"train": ["a", "b"], "weights": [1, float("nan")]},
            r"must be above 0 and finite, got \[1.0, nan\]",
        ),
        ({"train": "a", "pack": "all"}, '`data.pack` must be one of "documents", "none", got \'all\''),
        ({"train": "a", "loss_on": "user"}, '`data.loss_on` must be one of "all", "assistant", got \'user\''),
        ({"train": "a", "long_documents": "drop"}, '`data.long_documents` must be one of "split", "refuse", got'),
    ],
)
def test_settings_that_mean_nothing_are_refused(tree, message):
    with pytest.raises(UsageError, match=message):
        decode(DataSection, tree, "data")


def test_each_setting_is_explained():
    table = describe_settings()
    for field in dataclasses.fields(DataSection):
        [line] = [line for line in table.splitlines() if line.split()[:1] == [f"--data.{field.name}"]]
        assert len(line.split()) > 1
