"""Where tables are kept: those of built-in models in the package, all others in the user's cache, one file a model."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from planish.decode import method_name
from planish.methods import Checkpoint, Offload, Plain, Plan, Tiled
from planish.price.table import LayerTable

_FORMAT = 1
PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """The tables of one model, and its config where it is built in; read anew at each question.

    Attributes:
        path: Where they are kept; the file need not be there.
    """

    path: Path

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        return self._tree()["config"]

    def read(self, name: str) -> LayerTable | None:
        """Return the table called `name`; None where there is none that the installed libraries would make again."""
        tree = self._tree()
        if tree.get("made_with") != libraries() or name not in tree["tables"]:
            return None
        return LayerTable.from_dict(tree["tables"][name])

    def write(self, tables: Mapping[str, LayerTable], **facts: Any) -> None:
        """Keep tables, and facts such as the config, beside what is there.

        Raises:
            OSError: The folder cannot be written.
        """
        tree = self._tree()
        kept = tree["tables"] if tree.get("made_with") == libraries() else {}
        kept |= {name: table.to_dict() for name, table in tables.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        new.write_text(json.dumps(tree | facts | {"made_with": libraries(), "tables": kept}) + "\n", encoding="utf-8")
        new.replace(self.path)

    def _tree(self) -> dict[str, Any]:
        try:
            return json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {"tables": {}}


def preset(name: str) -> TableFile | None:
    """Return the file of a built-in model that the package carries, None where it carries none."""
    file = TableFile(path=PRESETS / f"{name}.json")
    return file if file.path.is_file() else None


def cached(folder: Path, facts: Mapping[str, Any]) -> TableFile:
    """Return the file in a cache folder for the model that `facts` describe in full."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return TableFile(path=folder / "tables" / f"{digest[:16]}.json")


def table_name(plan: Plan, *, dtype: str, rows: int, num_shards: int = 1, copied: bool = False) -> str:
    """Return what the table for a plan, a dtype, shards, copies and (with plain attention) rows is called."""
    boundary = Checkpoint() if isinstance(plan.boundary, Offload) else plan.boundary
    methods = (plan.attention, plan.dispatch, boundary)
    words = [dtype.removesuffix("-pure"), *(method_name(type(each)) for each in methods)]
    if not isinstance(plan.activation, Plain):
        words.append(method_name(type(plan.activation)))
    if isinstance(plan.activation, Tiled) and plan.activation.norms:
        words.append("norms")
    if isinstance(plan.attention, Plain):
        words.append(f"{rows} rows")
    if num_shards > 1:
        words.append(f"{num_shards} shards")
    if copied:
        words.append("copied")
    return " ".join(words)


def libraries() -> dict[str, Any]:
    """Return what decides which tensors a layer makes."""
    names = ("planish", "torch", "transformers")
    return {"format": _FORMAT} | {name: ".".join(version(name).split(".")[:2]) for name in names}
