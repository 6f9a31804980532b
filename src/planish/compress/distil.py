"""Blockwise distillation: each block of a library learns its parent layer's output from its parent layer's input (BLD).

No gradient crosses a layer, so layers may be trained in any order and in any company with the same result. Here it is
one after the other: a layer is in memory with one of its blocks, and what its text looks like before and after it is
there too, or on disk. A block is attention or network beside the parent's other one (decoupled), or both in one
(coupled).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from planish.compress.frontier import Frontier, frontiers, staging_bytes
from planish.compress.library import ENDS, Library, block_name, pair_name
from planish.compress.parent import Parent
from planish.compress.pupil import Distillation, Lesson, Pupil, Trained
from planish.compress.space import (
    Choice,
    KeepHeads,
    NoAttention,
    NoFfn,
    Option,
    SlidingWindow,
    Space,
    Width,
)
from planish.models.child import ChildLayer

Pairs = Mapping[int, Sequence[Choice]]


def distil_bytes(
    space: Space, rows: int, context: int, settings: Distillation, sizes: tuple[int, int, int], *, pairs: bool = False
) -> int:
    """Return the bytes that tensors hold at most while `distil` runs on a parent that is read layer by layer.

    Args:
        space: What layers may be.
        rows: Of text.
        context: Tokens of a row.
        settings: How blocks are trained.
        sizes: Bytes of the largest layer, of what is outside of layers, and of one number.
        pairs: Whether attention and network of a layer are trained together.
    """
    layer_bytes, ends_bytes, number_bytes = sizes
    wide = max(4, number_bytes)
    d, q = space.hidden_size, space.num_heads * space.head_dim
    layers = [layer for layer in space.layers if isinstance(layer.ffn[0], Width)]
    width = max((layer.ffn[0].width for layer in layers), default=0)
    pupil = max((each.width for layer in layers for each in layer.ffn[1:] if isinstance(each, Width)), default=0)
    hidden = 3 * rows * context * d * wide if settings.folder is None else staging_bytes()
    alone = 3 * d * pupil, 4 * d * q
    block = 7 * (sum(alone) if pairs else max(alone)) * wide  # its start, gradients, moments, steps
    batch = settings.batch_rows * context * (14 * d + 10 * q + 8 * width) * wide
    held = layer_bytes * (1 if number_bytes >= 4 else 1 + wide // number_bytes)
    return 8 * rows * context + max(2 * ends_bytes + hidden, hidden + held + block + batch)


def worth_training(option: Option, parent: Option) -> bool:
    """Return whether training moves a block: least squares has found the best single matrix already."""
    return option != parent and isinstance(option, KeepHeads | SlidingWindow | Width)


def distil(  # noqa: PLR0913 - keyword-only options of a public function
    parent: Parent,
    rows: Tensor,
    library: Library,
    trained: Library,
    settings: Distillation,
    *,
    chosen: Callable[[str], bool] = lambda _: True,
    pairs: Pairs | None = None,
    rank: int = 0,
    ranks: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Trained]:
    """Fill `trained` with `library`'s blocks, those that gain from it trained; what is in `trained` is kept.

    Memory:        the parent as it gives itself, one block four times (weights, gradients, moments) with a batch's
        activations, and three hidden states of all rows, or of a batch where `settings.folder` holds the others.
    Communication: none; layers are dealt to ranks, each of which runs the parent and writes its own.
    Exactness:     bitwise the same for any number of ranks, and for each block whatever others are trained.

    Args:
        parent: The model.
        rows: Token ids [N, S].
        library: Of initialised blocks.
        trained: A library of the same space.
        settings: How.
        chosen: Which blocks, by name, are trained; others are taken as they are.
        pairs: By layer, choices whose attention and network are trained as one, from where `library` has each.
        rank: Of this process.
        ranks: Processes that share the layers.
        progress: Called with the layers done and their number after each.
    """
    results: list[Trained] = []
    ends = parent.ends()
    if rank == 0 and ENDS not in trained:
        trained.take(library, ENDS)
    shape = (*rows.shape, library.space.hidden_size)
    with frontiers(shape, _wide(parent.dtype), settings.folder, parent.device) as (first, between, second):
        _embed(rows, ends, first, settings)
        for index in range(len(library.space.layers)):
            before, after = (first, second) if index % 2 == 0 else (second, first)
            with parent.layer(index) as layer, _frozen(layer, before.dtype) as teacher:
                lesson = Lesson(teacher=teacher, before=before, between=between, after=after)
                _teach(parent, lesson, settings)
                if index % ranks == rank:
                    results += _train_layer(parent, index, lesson, library, trained, settings, chosen)
                    choices = () if pairs is None else pairs.get(index, ())
                    results += _train_pairs(parent, index, lesson, library, trained, settings, choices)
            if progress is not None:
                progress(index + 1, len(library.space.layers))
    return results


def _batches(rows: Tensor | Frontier, settings: Distillation) -> Iterator[slice]:
    return (slice(start, start + settings.batch_rows) for start in range(0, len(rows), settings.batch_rows))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextmanager
def _frozen(layer: ChildLayer, dtype: torch.dtype) -> Iterator[ChildLayer]:
    """Give a layer whose weights take no gradient, in `dtype`; they do as before afterwards."""
    wanted = [each for each in layer.parameters() if each.requires_grad]
    given = {each.dtype for each in layer.parameters()}
    try:
        layer.requires_grad_(requires_grad=False)
        yield layer if given == {dtype} else _copied(layer, dtype)
    finally:
        for each in wanted:
            each.requires_grad_(requires_grad=True)


def _copied(layer: ChildLayer, dtype: torch.dtype) -> ChildLayer:
    return copy.deepcopy(layer).to(dtype)


def _embed(rows: Tensor, ends: dict[str, Tensor], first: Frontier, settings: Distillation) -> None:
    """Fill in what is before the first layer, and let the embedding go."""
    for here in _batches(rows, settings):
        first[here] = nn.functional.embedding(rows[here].to(ends["embedding"].device), ends["embedding"]).to(
            first.dtype
        )
    ends.clear()


@torch.no_grad()
def _teach(parent: Parent, lesson: Lesson, settings: Distillation) -> None:
    """Fill in what the layer makes of the rows before it."""
    teacher = lesson.teacher
    for here in _batches(lesson.before, settings):
        hidden = lesson.before[here]
        around = parent.blocks.around_call(teacher, hidden)
        between = hidden + teacher.self_attn(teacher.input_layernorm(hidden), **around)[0]
        lesson.between[here] = between
        lesson.after[here] = between + teacher.mlp(teacher.post_attention_layernorm(between))


def _train_layer(
    parent: Parent,
    index: int,
    lesson: Lesson,
    library: Library,
    trained: Library,
    settings: Distillation,
    chosen: Callable[[str], bool],
) -> list[Trained]:
    results = []
    space = library.space.layers[index]
    for kind, options in (("attention", space.attention), ("ffn", space.ffn)):
        for option in options:
            name = block_name(index, kind, option)
            if name in trained:
                continue
            if not (worth_training(option, options[0]) and chosen(name)):
                trained.take(library, name)
                continue
            choice = (
                Choice(attention=option, ffn=NoFfn())
                if kind == "attention"
                else Choice(attention=NoAttention(), ffn=option)
            )
            block = Pupil(parent, index, kind, choice, library.read(name), lesson, settings)
            results.append(block.learn(name))
            if not results[-1].after < results[-1].before:
                trained.take(library, name)
                continue
            info = library.info(name)
            block.write(name, trained, made=f"{info.made}, distilled", plain_error=info.plain_error)
    return results


def _train_pairs(
    parent: Parent,
    index: int,
    lesson: Lesson,
    library: Library,
    trained: Library,
    settings: Distillation,
    choices: Sequence[Choice],
) -> list[Trained]:
    """Train attention and network together; a pair that does not gain on held-out rows is written as it was."""
    results = []
    for choice in choices:
        name = pair_name(index, choice)
        if name in trained:
            continue
        block = Pupil(parent, index, "pair", choice, library.layer(index, choice), lesson, settings)
        start = block.error()
        results.append(block.learn(name))
        block.write(name, trained, made="both, distilled", plain_error=start)
    return results
