"""The run file: one tree of settings, the same in TOML and as flags (`--train.steps 100`)."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

import tomli_w

from planish.decode import decode, encode, fields_of
from planish.errors import UsageError
from planish.methods import (
    Apollo,
    Blocked,
    Packed,
    Pipelined,
    Plain,
    Plan,
    Ring,
    Tiled,
    updates_in_backward,
)
from planish.sections import (
    DataSection,
    DistilSection,
    MemorySection,
    MeshSection,
    ModelSection,
    SaveSection,
    TrainSection,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """All settings of one run."""

    model: ModelSection
    data: DataSection
    train: TrainSection = field(default_factory=TrainSection)
    memory: MemorySection = field(default_factory=MemorySection)
    mesh: MeshSection = field(default_factory=MeshSection)
    plan: Plan = field(default_factory=Plan)
    save: SaveSection = field(default_factory=SaveSection)
    distil: DistilSection = field(default_factory=DistilSection)

    def __post_init__(self) -> None:
        train, unit = self.train, self.data.context * self.train.grad_accum * self.mesh.readers
        if train.global_tokens is not None and train.global_tokens % unit:
            near = max(1, round(train.global_tokens / unit)) * unit
            sizes = f"{self.data.context} x {train.grad_accum}"
            of = "" if self.mesh.cp == 1 else " / `mesh.cp`"
            ranks = "" if self.mesh.readers == 1 else f" x the ranks of `mesh`{of}"
            sizes += "" if self.mesh.readers == 1 else f" x {self.mesh.readers}"
            raise ValueError(
                f"`train.global_tokens` ({train.global_tokens}) must be a multiple of `data.context` x "
                f"`train.grad_accum`{ranks} ({sizes}); try {near}."
            )
        self._check_optim()
        if self.mesh.ep > 1 and not isinstance(self.plan.dispatch, Pipelined):
            raise ValueError(
                f"`mesh.ep` ({self.mesh.ep}) spreads experts, which `plan.dispatch` = pipelined alone can run; set it, "
                "or leave `mesh.ep` out."
            )
        if self.mesh.ep == 1 and isinstance(self.plan.dispatch, Pipelined):
            for name in ("borrow", "borrow_routes"):
                if getattr(self.plan.dispatch, name) is not None:
                    raise ValueError(
                        f"`plan.dispatch.{name}` lends experts to other ranks, which has no effect without `mesh.ep`; "
                        "set that, or leave it out."
                    )
        if (self.mesh.vp > 1) != isinstance(self.plan.vocab, Ring):
            raise ValueError(
                f"`mesh.vp` ({self.mesh.vp}) and `plan.vocab` = ring go together: set both, for ranks that share the "
                "vocabulary, or neither."
            )

        self._check_sequence()
        if self.distil.from_ is not None and self.mesh.size > 1:
            raise ValueError("`distil.from` teaches on one rank; leave `mesh` out.")
        if self.mesh.pp > 1:
            self._check_pipeline()
        elif self.plan.pipeline is not None:
            raise ValueError("`plan.pipeline` has no effect without `mesh.pp`; set it to the ranks, or leave it out.")

    @property
    def rows_per_microbatch(self) -> int:
        """Rows of `data.context` tokens in one rank's microbatch; with `mesh.cp` it holds a span of each."""
        if self.train.global_tokens is None:
            return 1
        return self.train.global_tokens // (self.data.context * self.train.grad_accum * self.mesh.readers)

    @property
    def tokens_per_microbatch(self) -> int:
        """The most tokens of one rank's microbatch: rows x context, or x its largest span."""
        return self.rows_per_microbatch * -(-self.data.context // self.mesh.cp)

    def _check_sequence(self) -> None:
        degree = self.mesh.cp
        if degree > 1 and not isinstance(self.plan.attention, Packed):
            raise ValueError(
                f"`mesh.cp` ({degree}) shares rows between ranks, which `plan.attention` = packed alone can do; set "
                "it, or leave `mesh.cp` out."
            )
        if degree > self.data.context:
            raise ValueError(
                f"`mesh.cp` ({degree}) must not exceed `data.context` ({self.data.context}): each rank takes a span "
                f"of every row; set `mesh.cp` to {self.data.context} or less."
            )

    def _check_optim(self) -> None:
        method, in_backward = self.plan.optim, updates_in_backward(self.plan.optim)
        if in_backward and self.train.clip:
            limited = ", `plan.optim.limiter` bounds each update's growth" if isinstance(method, Apollo) else ""
            raise ValueError(
                f"`train.clip` ({self.train.clip}) cannot be kept with `plan.optim.in_backward`, where no gradient "
                f"waits for the norm of all; set `train.clip = 0`{limited}."
            )
        if in_backward and self.mesh.replicate > 1:
            raise ValueError(
                "`plan.optim.in_backward` updates a weight before replicas have exchanged its gradient; set "
                "`mesh.replicate = 1`, and shard by `mesh.dp`."
            )
        if isinstance(method, Apollo) and 1 < self.mesh.ep < self.mesh.peers:
            raise ValueError(
                f"`plan.optim` = apollo takes weights that are split one way, and with `mesh.ep` ({self.mesh.ep}) on "
                f"{self.mesh.peers} ranks the copies of experts are split too; set `mesh.ep = {self.mesh.peers}`."
            )
        if isinstance(method, Apollo) and method.weights == "int8" and self.mesh.size > 1:
            raise ValueError("`plan.optim.weights` = int8 is for one rank; leave it out, and shard by `mesh.dp`.")

    def _check_pipeline(self) -> None:
        """Refuse what stages cannot do: what lives from a forward to the backward right after it, or spans layers."""
        plan = self.plan
        for name, goes, instead in (
            ("plan.activation", isinstance(plan.activation, Plain | Tiled), '"tiled" or "plain"'),
            ("plan.vocab", isinstance(plan.vocab, Blocked), '"blocked"'),
            ("plan.vocab.strategy", getattr(plan.vocab, "strategy", "auto") == "auto", '"auto"'),
            ("plan.optim.in_backward", not updates_in_backward(plan.optim), "false"),
            ("memory.on_exceed", self.memory.on_exceed != "adapt", '"strict" or "warn"'),
        ):
            if not goes:
                raise ValueError(f"`{name}` does not go with `mesh.pp` ({self.mesh.pp}); set it to {instead}.")
        method = "1f1b" if plan.pipeline is None else plan.pipeline.method
        if self.mesh.peers > 1 and method in {"v-half", "v-min"}:
            raise ValueError(
                f"`plan.pipeline` = {method} splits backward in two, and the weights of {self.mesh.peers} ranks that "
                'share layers are gone in between; set it to "1f1b", or `mesh.dp` and `mesh.replicate` to 1.'
            )

    def to_toml(self) -> str:
        """Return every setting, defaults included, as a run file."""
        return tomli_w.dumps(encode(self))


def load(path: Path | None, settings: list[tuple[str, Any]]) -> RunFile:
    """Return the run file at `path` with `settings` (dotted name, value) laid over it.

    Raises:
        UsageError: A file that cannot be read, an unknown key, or a value that is refused.
    """
    tree = load_tree(path, settings)
    try:
        return decode(RunFile, tree)
    except UsageError as error:
        if path is None:
            raise
        raise UsageError(f"{path}{' with its flags' if settings else ''}: {error}") from error


def load_tree(path: Path | None, settings: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the tables of the run file at `path` with `settings` laid over them, none of it looked at yet.

    Raises:
        UsageError: A file that cannot be read.
    """
    tree = _read(path) if path is not None else {}
    for name, value in settings:
        _put(tree, name, value)
    return tree


def split_flags(words: list[str]) -> tuple[list[tuple[str, Any]], list[str]]:
    """Return the settings in `words` as (dotted name, value), and the words that are no settings.

    A setting is written `--a.b value`, `--a.b=value` or bare `--a.b` (true); `--memory` is short for `--memory.budget`.
    One that holds several values collects them where it is given again; of others the last one counts.
    """
    settings: dict[str, Any] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word[2:].partition("=")
        if not word.startswith("--") or ("." not in name and name != "memory"):
            others.append(word)
            continue
        if not equals:
            text = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        name = "memory.budget" if name == "memory" else name.replace("-", "_")
        value = _flag_value(text)
        again = name in settings and _holds_several(name)
        settings[name] = [*_listed(settings[name]), *_listed(value)] if again else value
    return list(settings.items()), others


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors may begin a file with a byte-order mark
    except FileNotFoundError as error:
        raise UsageError(f"run file {path} does not exist; name a TOML file or give settings as flags.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"run file {path} is not UTF-8 at byte {error.start}.") from error
    except OSError as error:
        raise UsageError(f"run file {path} cannot be read: {error.strerror}.") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"run file {path} is not TOML: {error}") from error


def _flag_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _holds_several(name: str) -> bool:
    section, _, key = name.partition(".")
    classes = {"model": ModelSection, "data": DataSection, "train": TrainSection}
    found = fields_of(classes[section]).get(key) if section in classes else None
    return found is not None and get_origin(found[1]) is tuple


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            child = tree[parent] = {"method": child}
        tree = child
    tree[leaf] = value
