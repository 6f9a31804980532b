"""Which stages have a price, for a run file and for the planner, and what a candidate's ranks hold."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from planish.methods import AdamW, Blocked, Offload, Plain, Plan
from planish.plan.estimate import Estimate
from planish.plan.question import Candidate
from planish.price.sharding import is_of_layer
from planish.shapes import ExpertsShape, ModelShape, TensorShape

_SCALED = ("gemma", "granite")


def has_price(plan: Plan, tree: Mapping[str, Any] | None, dtype: str) -> bool:
    """Return whether there is a price for a plan's stages, as far as can be told without the model's table.

    There is none for weight halves, which keep what no table knows of, for what leaves the device, for embeddings that
    are scaled (Gemma's, Granite's), and where layers that keep everything end in the norm of a narrow dtype.
    """
    whole = plan.pipeline is None or plan.pipeline.method == "1f1b"
    stays = not isinstance(plan.boundary, Offload) and isinstance(plan.optim, AdamW)
    kept = isinstance(plan.boundary, Plain) and dtype != "fp32"
    return whole and stays and isinstance(plan.vocab, Blocked) and not kept and not scales_embedding(tree)


def scales_embedding(tree: Mapping[str, Any] | None) -> bool:
    """Return whether a model, by its config, multiplies its embeddings, or may do so where there is none."""
    return tree is None or str(tree.get("model_type")).startswith(_SCALED)


def is_even(tensors: Iterable[TensorShape], num_layers: int) -> bool:
    """Return whether all layers of a model with these tensors have the same ones."""
    layers = [each for each in tensors if is_of_layer(each.name)]
    return bool(layers) and all(each.count % num_layers == 0 for each in layers)


def experts_per_token(tree: Mapping[str, Any] | None) -> int:
    """Return the experts that a token meets, by a model's config."""
    text = (tree or {}).get("text_config", tree) or {}
    return text.get("num_experts_per_tok") or 1


def price_of_stages(shape: ModelShape, tree: Mapping[str, Any]) -> Callable[[Candidate], Estimate] | None:
    """Return what prices a candidate with `mesh.pp`; None where the stages of this model have no price."""
    even = is_even(shape.tensors, len(shape.layers))
    return _price if even and not scales_embedding(tree) else None


def _price(candidate: Candidate) -> Estimate:
    """Return what each rank holds from the first step on; what rank 0 loads before that is told apart."""
    from planish.train.stage_price import estimate_stages  # schedules, which most questions do without

    mesh, question = candidate.mesh, candidate.question
    experts = (layer.ffn for layer in question.shape.layers)
    return estimate_stages(
        candidate.table,
        candidate.batch,
        candidate.plan,
        num_ranks=mesh.pp,
        top_k=next((each.top_k for each in experts if isinstance(each, ExpertsShape)), 1),
        master=question.master,
        num_shards=mesh.dp,
        deals=False,
    )
