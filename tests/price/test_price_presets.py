"""The tables in the package are what the installed libraries make of the built-in models' configs."""

import pytest
from transformers import AutoConfig

from planish.methods import Checkpoint, Packed, Plain, Plan, Tiled
from planish.models.builtin import BUILT_IN
from planish.price.config import read_config
from planish.price.store import preset, table_name
from planish.sections import ModelSection
from planish.train.layer_table import fit_table

PLANS = [
    (dtype, Plan(attention=attention, activation=activation, boundary=boundary))
    for dtype in ("bf16", "fp32")
    for attention, activation in ((Packed(), Plain()), (Packed(), Tiled()), (Plain(), Plain()))
    for boundary in (Checkpoint(), Plain())
]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize(
    ("dtype", "plan"), [PLANS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in PLANS[1:])]
)
def test_a_shipped_table_is_the_fitted_one(name, dtype, plan, tmp_path):
    file = preset(name)
    kind = file.config["model_type"]
    config = AutoConfig.for_model(kind, **{key: value for key, value in file.config.items() if key != "model_type"})
    section = ModelSection(from_=name, dtype=dtype)
    shipped = file.read(table_name(plan, dtype=dtype, rows=1))
    assert shipped is not None, "other libraries than the tables were made with: run benchmarks/presets.py"
    assert shipped == fit_table(config, section, plan, rows=1)
    assert sum(each.numel * each.count for each in shipped.tensors) == read_config(file.config).num_parameters


def test_norms_in_tiles_have_a_table_of_their_own():
    plans = [Plan(activation=each) for each in (Plain(), Tiled(), Tiled(norms=True))]
    assert len({table_name(plan, dtype="bf16", rows=1) for plan in plans}) == 3
