"""The tables of a run file, each a frozen dataclass whose docstring is its help."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from planish.decode import Bytes, Count
from planish.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSection:
    """The mixture that a dense model becomes: `experts` copies of each feed-forward network, a token uses `top_k`."""

    experts: Count
    top_k: Count

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ValueError(f"`model.moe.top_k` ({self.top_k}) must not exceed `model.moe.experts` ({self.experts}).")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSection:
    """LoRA by peft: the model's own weights are frozen, each target learns a product of two thin matrices.

    Attributes:
        rank: Columns of the first and rows of the second.
        alpha: The product is scaled by alpha / rank.
        dropout: Share of each target's input that is dropped, in training.
        targets: Names of linear layers, such as ["q_proj", "v_proj"]; default: all of them but the head.
    """

    rank: Count = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"`model.adapter.alpha` must be above 0, got {self.alpha}; try twice the rank.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`model.adapter.dropout` must be in [0, 1), got {self.dropout}; 0 turns it off.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """Which model: exactly one of `from`, `gguf` and `config`.

    Attributes:
        from_: A transformers causal LM folder, or the name of a built-in model ("smollm2-135m").
        gguf: A `.gguf` file that transformers can open.
        config: A transformers `config.json`; the weights are drawn from `train.seed`.
        tokenizer: A folder or built-in model to take the tokenizer from, where the model brings none.
        dtype: "bf16" computes in bf16 with fp32 master weights, "bf16-pure" keeps no master, "fp32" is fp32 throughout.
        rope: Rotary parameters that replace the model's own, for contexts beyond its positions.
        moe: Turns a dense model into a mixture with the same function, `{experts = 8, top_k = 2}`.
        extend_positions: Raises the model's position limit to `data.context` without changing its rotary parameters.
        adapter: Trains a LoRA adapter on the frozen model, `{rank = 16}`; the run saves it in peft's format.
        freeze: Parts of weights' names, such as ["experts", "gate"]: those weights stay as they are.
    """

    from_: str | None = None
    gguf: Path | None = None
    config: Path | None = None
    tokenizer: str | None = None
    dtype: Literal["bf16", "bf16-pure", "fp32"] = "bf16"
    rope: dict[str, Any] | None = None
    extend_positions: bool = False
    moe: MoeSection | None = None
    adapter: AdapterSection | None = None
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given = [name for name in ("from_", "gguf", "config") if getattr(self, name) is not None]
        if len(given) != 1:
            words = ", ".join(f"`model.{name.removesuffix('_')}`" for name in given) or "none"
            raise UsageError(
                f"exactly one of `model.from`, `model.gguf` and `model.config` must be given, got {words}; "
                'for example `model.from = "smollm2-135m"`.'
            )
        if self.adapter is not None and self.freeze:
            raise UsageError("`model.adapter` freezes every weight of the model already; leave `model.freeze` out.")
        if self.adapter is not None and (self.moe is not None or self.config is not None):
            other = "model.moe" if self.moe is not None else "model.config"
            raise UsageError(
                f"`model.adapter` needs weights that stay as they are on disk, and `{other}` makes new ones."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """What to train on.

    Attributes:
        train: Files (.txt, .jsonl, .parquet, .bin), folders of them, or "builtin:english", "builtin:python".
        eval: The same, held out; empty means no evaluation.
        weights: Share of the tokens of each entry of `train`; empty shuffles all documents together.
        context: Tokens in one row.
        pack: "documents" fills rows with documents one after the other, "none" gives each document its own row.
        long_documents: "split" cuts a document longer than `context`, "refuse" stops there.
        loss_on: "all" counts every token, "assistant" only what the assistant says in chat messages.
        seed: Order of the documents.
        eval_tokens: Evaluation stops after this many tokens.
    """

    train: tuple[str, ...]
    eval: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    context: Count = 2048
    pack: Literal["documents", "none"] = "documents"
    long_documents: Literal["split", "refuse"] = "split"
    loss_on: Literal["all", "assistant"] = "all"
    seed: int = 0
    eval_tokens: Count = 65536

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError('`data.train` must name at least one source, for example "builtin:english".')
        if len(self.weights) not in (0, len(self.train)):
            raise ValueError(
                f"`data.weights` must have one number for each of the {len(self.train)} entries of `data.train`, "
                f"got {len(self.weights)}."
            )
        if not all(0 < weight < math.inf for weight in self.weights):
            raise ValueError(
                f"`data.weights` must be above 0 and finite, got {list(self.weights)}; leave out what is not wanted."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    """How to train.

    Attributes:
        steps: Optimizer steps.
        global_tokens: Tokens of one optimizer step; default: one row of `data.context` per microbatch and rank.
        grad_accum: Microbatches of one optimizer step.
        lr: Peak learning rate.
        schedule: Shape of the learning rate after the warm-up; "cosine" and "linear" end at zero.
        warmup: Steps over which the learning rate rises from zero.
        clip: Largest global gradient norm; 0 turns clipping off.
        weight_decay: AdamW's decoupled decay, for matrices only.
        betas: AdamW's decay rates of both moments.
        eps: AdamW's denominator offset.
        eval_every: Steps between evaluations; 0 means only at the end.
        seed: Weights drawn from a config, and every other random number.
    """

    steps: Count = 100
    global_tokens: Count | None = None
    grad_accum: Count = 1
    lr: float = 1e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: int = 0
    clip: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, ...] = (0.9, 0.95)
    eps: float = 1e-8
    eval_every: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"`train.{name}` must be above 0 and finite, got {value}; write for example 1e-4.")
        for name in ("warmup", "clip", "weight_decay", "eval_every"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"`train.{name}` must be 0 or more and finite, got {value}; 0 turns it off.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"`train.seed` must be in 0 to 2^63 - 1, got {self.seed}.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`train.betas` must be two numbers in [0, 1), got {list(self.betas)}; try [0.9, 0.95].")
        if self.warmup > self.steps:
            raise ValueError(f"`train.warmup` ({self.warmup}) must not exceed `train.steps` ({self.steps}).")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilSection:
    """A teacher whose next-token distributions, and hidden states after each layer, the model learns (Puzzle's GKD).

    Attributes:
        from_: The teacher: a transformers folder or a built-in model, with the model's vocabulary; default: none.
        kl: Weight of KL(teacher || model) of a token.
        cosine: Weight of the sum over layers of 1 - cosine of both hidden states; a compressed child of the teacher
            alone has layers to compare.
        lm: Weight of the next token's cross-entropy.
        stream: Reads the teacher's layers from its folder for each microbatch, one in memory at a time.
    """

    from_: str | None = None
    kl: float = 1.0
    cosine: float = 1.0
    lm: float = 0.0
    stream: bool = False

    def __post_init__(self) -> None:
        if min(self.kl, self.cosine, self.lm) < 0 or self.kl + self.cosine + self.lm == 0:
            raise ValueError("`distil.kl`, `distil.cosine` and `distil.lm` must not be negative, and not all 0.")
        if self.from_ is None and (self.kl, self.cosine, self.lm, self.stream) != (1.0, 1.0, 0.0, False):
            raise ValueError("`distil` has no effect without a teacher; name one as `distil.from`.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySection:
    """What may be used.

    Attributes:
        budget: Bytes that tensors may hold at any moment, such as "3GiB"; default: no limit.
        on_exceed: "strict" stops the run (exit 4) at the first byte too many; "adapt" makes tiles finer, the same
            mathematics, at launch and between steps, and stops where that is not enough; "warn" says so and goes on.
    """

    budget: Bytes | None = None
    on_exceed: Literal["strict", "adapt", "warn"] = "strict"

    def __post_init__(self) -> None:
        if self.budget is None and self.on_exceed != "strict":
            raise ValueError(
                f'`memory.on_exceed` = "{self.on_exceed}" has no effect without `memory.budget`; set that, or leave it '
                "out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSection:
    """How the ranks that `torchrun` starts share the work; each takes its rows, or its layers, of every microbatch.

    With `pp` all other degrees are of the ranks that hold the same layers.

    Attributes:
        dp: Ranks over which weights, gradients and optimizer state are sharded; default: all that are left.
        replicate: Groups of such ranks that hold the same shards; with `dp = 1`, each rank holds everything.
        ep: Ranks of `dp` over which the experts of a layer are spread; tokens travel to them.
        vp: Ranks of `dp` that share the vocabulary, each with its rows of head and embedding.
        cp: Ranks of `dp` that share rows, each with its span of every row's tokens.
        pp: Ranks over which layers are divided, in stages that take turns, and which share embedding and head.
        timeout_s: Seconds after which a rank that does not answer is lost.
    """

    dp: Count | None = None
    replicate: Count = 1
    ep: Count = 1
    vp: Count = 1
    cp: Count = 1
    pp: Count = 1
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"`mesh.timeout_s` must be above 0, got {self.timeout_s}; try 600.")
        for name, degree in (("ep", self.ep), ("vp", self.vp), ("cp", self.cp)):
            if self.dp is not None and self.dp % degree:
                raise ValueError(
                    f"`mesh.{name}` ({degree}) must divide `mesh.dp` ({self.dp}); one of {_divisors(self.dp)}."
                )
        if self.pp > 1 and self.vp > 1:
            raise ValueError(
                f"`mesh.vp` ({self.vp}) does not go with `mesh.pp` ({self.pp}), whose ranks share the vocabulary "
                "already; leave `mesh.vp` out."
            )

    @property
    def size(self) -> int:
        """Ranks of the run."""
        return self.peers * self.pp

    @property
    def peers(self) -> int:
        """Ranks that hold the same layers: all of them, or those of one stage of a pipeline."""
        return (self.dp or 1) * self.replicate

    @property
    def readers(self) -> int:
        """Ranks, or groups of `cp`, that take rows of their own; the stages of a pipeline all work on the same."""
        return max(1, self.peers // self.cp)

    @property
    def sharded(self) -> bool:
        """Whether ranks hold shards of the weights."""
        return (self.dp or 1) > 1

    def over(self, size: int) -> "MeshSection":
        """Return the mesh over the `size` ranks that were started.

        Raises:
            ValueError: They are not the ranks that were asked for.
        """
        degrees = [("replicate", self.replicate), *([("pp", self.pp)] if self.pp > 1 else [])]
        names = " x ".join(f"`mesh.{name}`" for name, _ in degrees)
        numbers, others = " x ".join(str(degree) for _, degree in degrees), self.replicate * self.pp
        if self.dp is not None and self.size != size:
            raise ValueError(
                f"{names} x `mesh.dp` ({numbers} x {self.dp}) must be the {size} ranks that were "
                f"started; set `mesh.dp = {max(1, size // others)}` or start {self.size} with `torchrun`."
            )
        if size % others:
            raise ValueError(
                f"{names} ({numbers}) must divide the {size} ranks that were started; one of {_divisors(size)}."
            )
        return replace(self, dp=size // others)


def _divisors(number: int) -> str:
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSection:
    """Where results go.

    Attributes:
        dir: The run folder.
        every: Steps between checkpoints; 0 means only at the end.
        keep: Checkpoints kept; older ones are removed once a newer one is complete.
        host: Bytes of host memory on each rank from which checkpoints are written while training goes on, such as
            "2GiB"; it waits only while they are full. Default: none, training waits for the disk.
    """

    dir: Path = Path("runs/run")
    every: int = 0
    keep: Count = 2
    host: Bytes | None = None

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"`save.every` must be 0 or more, got {self.every}; 0 saves at the end only.")
        if self.host is not None and self.host < 2**16:
            raise ValueError(f'`save.host` must be at least "64KiB", got {self.host} bytes; try "256MiB".')
