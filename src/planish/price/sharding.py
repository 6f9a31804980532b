"""What one rank of a mesh holds of each parameter, and what it holds whole while a layer is at work (FSDP2)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from planish.shapes import MeshShape, ModelShape, TensorShape, shard_of

_REDUCED = 4
_VOCABULARY = ("model.embed_tokens.weight", "model.embeddings.weight", "lm_head.weight", "lm_head.bias")


def is_expert(name: str) -> bool:
    """Return whether a parameter is that of routed experts."""
    return ".experts." in name


def is_of_layer(name: str) -> bool:
    """Return whether a parameter is inside a layer."""
    return ".layers." in name


def whole_part(tensor: TensorShape, mesh: MeshShape) -> TensorShape:
    """Return what a rank multiplies by: a parameter whole, but its own experts, and its own rows of the vocabulary."""
    degree = mesh.ep if is_expert(tensor.name) else mesh.vp if tensor.name in _VOCABULARY else 1
    first, *rest = tensor.shape
    return replace(tensor, shape=(-(-first // degree), *rest))


def own_part(tensor: TensorShape, mesh: MeshShape) -> TensorShape:
    """Return what a rank keeps from step to step; of a pipeline as if it had all stages and all rows."""
    if mesh.pp > 1 and not is_of_layer(tensor.name):
        return tensor
    if tensor.name in _VOCABULARY and mesh.vp > 1:
        return whole_part(tensor, mesh)
    if is_expert(tensor.name) and mesh.ep > 1:
        part = whole_part(tensor, mesh)
        return replace(part, shape=_shard_inside(part.shape, mesh.dp // mesh.ep))
    return replace(tensor, shape=shard_of(tensor.shape, mesh.dp))


def stage_share(shape: ModelShape, mesh: MeshShape) -> float:
    """Return the share of the layers that the largest stage has."""
    num_layers = len(shape.layers)
    return -(-num_layers // mesh.pp) / num_layers


@lru_cache(maxsize=1024)
def num_kept(shape: ModelShape, mesh: MeshShape) -> float:
    """Return how many numbers of parameters a rank keeps: of its stage, and its rows of the vocabulary."""
    sizes = [(each.name, own_part(each, mesh).numel * each.count) for each in shape.tensors]
    inside = sum(size for name, size in sizes if is_of_layer(name))
    beside = sum(size for name, size in sizes if not is_of_layer(name))
    return inside * stage_share(shape, mesh) + beside / mesh.pp


@lru_cache(maxsize=1024)
def num_gathered(shape: ModelShape, mesh: MeshShape) -> int:
    """Return how many numbers of parameters a rank has whole while its layers are at work, and not between steps."""
    pairs = [(whole_part(each, mesh), own_part(each, mesh)) for each in shape.tensors]
    return sum(whole.numel * whole.count for whole, own in pairs if whole.shape != own.shape)


def _shard_inside(sizes: tuple[int, ...], num_shards: int) -> tuple[int, ...]:
    """Return the shard of experts' weights along an axis within each expert."""
    first, *rest = sizes
    axis = next((axis for axis, size in enumerate(rest) if size % num_shards == 0), 0)
    return (first, *rest[:axis], -(-rest[axis] // num_shards), *rest[axis + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Weights and gradients that a rank holds whole for a while.

    [Note: what FSDP2 holds] The weights beside the layers for the whole pass, twice while they arrive. Of the layers
    two, the one at work and the next, and a third's pieces while they arrive between layers. In backward also the
    previous layer's gradients in the dtype that they are added up in. Experts that several ranks hold are gathered on
    their own: behind their layer's other weights, with those of the next layer on their way meanwhile; and theirs are
    the gradients on their way once their backward is over.

    Attributes:
        root: Bytes of the weights beside the layers.
        layer: Bytes of the largest layer's weights, but for experts that are gathered on their own.
        experts: Bytes of those.
        wide: Bytes of a number in which gradients are added up, over the bytes of a weight's.
    """

    root: int
    layer: int
    wide: float
    experts: int = 0

    @classmethod
    def of(cls, shape: ModelShape, mesh: MeshShape, itemsize: int) -> "Gathered | None":
        """Return what a rank of `mesh` gathers; None where it holds everything."""
        if mesh.dp == 1:
            return None
        gathered = [each for each in shape.tensors if whole_part(each, mesh).shape != own_part(each, mesh).shape]
        beside = [each for each in gathered if not is_of_layer(each.name)]
        alone = [each for each in gathered if is_expert(each.name) and mesh.ep > 1]
        return cls(
            root=_nbytes(beside, mesh, itemsize),
            layer=_nbytes_of_largest_layer(shape, [each for each in gathered if each not in alone], mesh, itemsize),
            wide=max(1.0, _REDUCED / itemsize),
            experts=_nbytes(alone, mesh, itemsize),
        )

    def at(self, phase: str, *, in_layer: bool, behind_experts: bool = False) -> int:
        """Return the bytes while a phase's layers, or what lies around them, are at work.

        Args:
            phase: As the ledger names it.
            in_layer: Whether a layer is at work.
            behind_experts: Whether the backward of its experts is over.
        """
        both = self.layer + self.experts
        match phase:
            case "forward" | "eval" if in_layer:
                return self.root + 2 * both
            case "forward" | "eval":
                return max(2 * self.root, self.root + 3 * both)
            case "head":
                return self.root + both
            case "backward" if in_layer and behind_experts:
                return self.root + max(self.layer + int((1 + self.wide) * self.experts), self._in_backward)
            case "backward" if in_layer:
                return self.root + self._in_backward
            case "backward":
                return int(self.wide * self.root) + 3 * both
            case _:
                return 0

    @property
    def _in_backward(self) -> int:
        return self.experts + int((2 + self.wide) * self.layer)


def _nbytes(tensors: Sequence[TensorShape], mesh: MeshShape, itemsize: int) -> int:
    return sum(whole_part(each, mesh).numel * itemsize for each in tensors)


def _nbytes_of_largest_layer(shape: ModelShape, gathered: Sequence[TensorShape], mesh: MeshShape, itemsize: int) -> int:
    """Return the bytes of a layer that has all that most layers have: dense and mixed layers have the same names."""
    inside = [each for each in gathered if is_of_layer(each.name)]
    num_layers = len(shape.layers)
    common = [each for each in inside if each.count == num_layers]
    others: dict[int, int] = {}
    for each in inside:
        if each.count != num_layers:
            others[each.count] = others.get(each.count, 0) + whole_part(each, mesh).numel * itemsize
    return _nbytes(common, mesh, itemsize) + max(others.values(), default=0)
