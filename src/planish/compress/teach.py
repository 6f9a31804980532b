"""Global distillation: the training engine with a teacher beside it (Puzzle's GKD).

loss of a token = kl * KL(teacher || student) + cosine * sum over layers (1 - cos(h_student, h_teacher)) + lm * CE

The teacher runs a microbatch before the student does, layer by layer; its hidden states wait until the student's are
there. Neither's logits are formed.
"""

from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from planish.compress.parent import Parent, StreamedParent, WholeParent
from planish.data.batch import IGNORED, Batch
from planish.errors import UsageError
from planish.models.builtin import model_folder
from planish.models.child import one_layer
from planish.models.child_files import is_child
from planish.models.load import load_model
from planish.peaks.vocab.kl import linear_kl
from planish.sections import DistilSection, ModelSection
from planish.train.engine import Engine
from planish.train.job import Job


class _Apart(torch.autograd.Function):
    """Sum over tokens of 1 - cosine of two hidden states, where `counts`.

    Memory: both states, which live anyway, and three numbers a token.
    """

    @staticmethod
    def forward(ctx: Any, found: Tensor, expected: Tensor, counts: Tensor) -> Tensor:
        a, b = found.to(_wide(found)), expected.to(_wide(found))
        norms = a.norm(dim=-1), b.norm(dim=-1)
        cosine = (a * b).sum(-1) / (norms[0] * norms[1]).clamp(min=1e-12)
        ctx.save_for_backward(found, expected, counts, *norms, cosine)
        return torch.where(counts, 1 - cosine, 0).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        found, expected, counts, norm_a, norm_b, cosine = ctx.saved_tensors
        a, b = found.to(cosine.dtype), expected.to(cosine.dtype)
        scale = torch.where(counts, upstream, 0) / norm_a.clamp(min=1e-12)
        towards = b / norm_b.clamp(min=1e-12)[..., None] - a * (cosine / norm_a.clamp(min=1e-12))[..., None]
        return (-scale[..., None] * towards).to(found.dtype), None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def cosine_apart(found: Tensor, expected: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of 1 - cos(found, expected) over the tokens that count.

    Args:
        found: Hidden states [B, S, D]; they get the gradient.
        expected: Another model's.
        counts: Which tokens [B, S].
    """
    return _Apart.apply(found, expected, counts)


class Teacher:
    """A parent's hidden states of the microbatch at work.

    Memory:        the parent as it gives itself, embedding and head, and of a microbatch one hidden state for every
        layer that is compared.

    Args:
        parent: The model.
        section: What the student learns of it.
    """

    def __init__(self, parent: Parent, section: DistilSection) -> None:
        self.parent, self.section = parent, section
        ends = parent.ends()
        self._embedding = ends["embedding"]
        self.head = ends.get("head", self._embedding)
        self._norm = one_layer(parent.config).norm.requires_grad_(requires_grad=False)
        self._norm.load_state_dict({"weight": ends["norm"]}, assign=True)
        self._states: list[Tensor] = []
        self.final: Tensor | None = None
        self._counts: Tensor | None = None
        self._apart: list[Tensor] = []

    @torch.no_grad()
    def see(self, batch: Batch, *, packed: bool) -> None:
        """Run a microbatch, and wait for the student's."""
        bounds = batch.cu_seq_lens if packed else None
        hidden = embedding(batch.input_ids, self._embedding)
        self._states, self._apart, self._counts = [], [], batch.target != IGNORED
        for index in range(self.parent.config.num_hidden_layers):
            with self.parent.layer(index) as layer:
                around = self.parent.blocks.around_call(layer, hidden, batch.position_ids, bounds)
                hidden = layer(hidden, **around)
            if self.section.cosine:
                self._states.append(hidden)
        self.final = self._norm(hidden)

    def compare(self, index: int, hidden: Tensor) -> None:
        """Count how far the student is after layer `index`."""
        if self._counts is not None and self._states:
            self._apart.append(cosine_apart(hidden, self._states[index], self._counts))

    def rest(self) -> Tensor | None:
        """Return what `compare` counted, and let the microbatch go."""
        found = torch.stack(self._apart).sum() if self._apart else None
        self._states, self._apart, self._counts = [], [], None
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtEngine(Engine):
    """An engine whose training loss is the distance to a teacher; its evaluation loss stays the next token's.

    Attributes:
        teacher: Whose.
        scales: The factors on logits of student and teacher.
    """

    teacher: Teacher
    scales: tuple[float, float]

    def local_loss(self, batch: Batch) -> Tensor:
        """Return the loss of this rank's rows, summed over the tokens that count."""
        if not self.anatomy.model.training:
            return Engine.local_loss(self, batch)
        with self.ledger.phase("forward"):
            self.teacher.see(batch, packed=self.packed)
            hidden = self.hidden(batch)
        with self.ledger.phase("head"):
            loss, section = self.teacher.rest(), self.teacher.section
            total = hidden.new_zeros((), dtype=torch.float32) if loss is None else section.cosine * loss
            if section.kl:
                total = total + section.kl * self._divergence(hidden, batch)
            elif section.lm:
                total = total + section.lm * self.head(hidden, batch.target, batch.num_valid)
            return total

    def _divergence(self, hidden: Tensor, batch: Batch) -> Tensor:
        return linear_kl(
            hidden,
            self.anatomy.weight,
            self.teacher.final,
            self.teacher.head,
            batch.target,
            ce_weight=self.teacher.section.lm / self.teacher.section.kl,
            logit_scale=self.scales[0],
            teacher_logit_scale=self.scales[1],
            reduction="sum",
            num_valid=batch.num_valid,
        )


def taught(job: Job, scope: ExitStack) -> Job:
    """Return `job` with the teacher that its run names.

    Raises:
        UsageError: A teacher of another vocabulary, or layers that cannot be compared.
    """
    section, engine = job.run.distil, job.engine
    if section.from_ is None:
        return job
    with engine.ledger.phase("init"):
        teacher = Teacher(_open(job, section), section)
        engine.ledger.adopt([*teacher.parent.resident(), teacher.head], "parameters", owner="teacher")
    if teacher.head.shape[0] != engine.anatomy.weight.shape[0]:
        raise UsageError(
            f"`distil.from` has {teacher.head.shape[0]} tokens, the model {engine.anatomy.weight.shape[0]}; a teacher "
            "needs the model's vocabulary."
        )
    model: Any = engine.anatomy.model
    teacher.parent.attend_by(model.config._attn_implementation)
    if section.cosine:
        alike = is_child(model.config) and model.config.parent_type == teacher.parent.config.model_type
        if not alike or model.config.num_hidden_layers != teacher.parent.config.num_hidden_layers:
            raise UsageError(
                "`distil.cosine` compares a compressed child with its parent, layer by layer; this is no such pair, so "
                "set it to 0."
            )
        backbone: Any = engine.anatomy.backbone
        backbone.watch = teacher.compare
        scope.callback(setattr, backbone, "watch", None)
    own = {each.name: getattr(engine, each.name) for each in fields(Engine)}
    return replace(job, engine=TaughtEngine(**own, teacher=teacher, scales=(engine.anatomy.logit_scale, 1.0)))


def _open(job: Job, section: DistilSection) -> Parent:
    folder = model_folder(section.from_ or "")
    dtype = job.engine.anatomy.model.dtype
    if section.stream:
        return StreamedParent(folder, device=job.engine.device, dtype=dtype)
    chosen = ModelSection(from_=section.from_, dtype="fp32" if dtype == torch.float32 else "bf16")
    if job.tokenizer is None:
        raise UsageError("`distil` needs data; a dry run has none.")
    model = load_model(chosen, context=job.run.data.context, tokenizer=job.tokenizer, seed=0)
    return WholeParent(model.eval().requires_grad_(requires_grad=False))
