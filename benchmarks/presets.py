"""Writes the tables of bytes that the package ships for built-in models; run it when a library or a table changes.

Not a measurement: every number is exact, and `tests/price/test_price_presets.py` fits one table again.
"""

import json
from itertools import product
from pathlib import Path

from transformers import AutoConfig

from planish.methods import Checkpoint, Packed, Plain, Plan, Tiled
from planish.models.builtin import BUILT_IN, model_folder
from planish.price.store import PRESETS, TableFile, table_name
from planish.sections import ModelSection
from planish.train.layer_table import fit_table

_ABOUT_THE_FILE = ("_name_or_path", "architectures", "transformers_version")

_LAYERS = ((Packed(), Plain()), (Packed(), Tiled()), (Plain(), Plain()))


def main() -> None:
    """Write one file for each built-in model."""
    for name in BUILT_IN:
        path = model_folder(name) / "config.json"
        tree = {key: value for key, value in json.loads(path.read_text()).items() if key not in _ABOUT_THE_FILE}
        tables = {}
        for dtype, (attention, activation), boundary in product(("fp32", "bf16"), _LAYERS, (Checkpoint(), Plain())):
            plan = Plan(attention=attention, activation=activation, boundary=boundary)
            config = AutoConfig.from_pretrained(Path(path).parent)
            section = ModelSection(from_=name, dtype=dtype)
            tables[table_name(plan, dtype=dtype, rows=1)] = fit_table(config, section, plan, rows=1)
        TableFile(path=PRESETS / f"{name}.json").write(tables, config=tree)


if __name__ == "__main__":
    main()
