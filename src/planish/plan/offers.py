"""Which methods a model may be offered beside those that any model can take."""

from planish.methods import Bitmap, Tiled
from planish.shapes import ExpertsShape, ModelShape

_RELU_FAMILY = ("relu", "relu2")


def activation_methods(shape: ModelShape) -> tuple[Bitmap | Tiled, ...]:
    """Return the exact ways to bound what feed-forward networks hold, the one that costs less time first.

    Packing is for networks of the ReLU family; tiles are for any dense network, shared experts included.
    """
    dense = any(not isinstance(layer.ffn, ExpertsShape) or layer.ffn.shared_width for layer in shape.layers)
    if not dense:
        return ()
    return (Bitmap(), Tiled()) if shape.hidden_act in _RELU_FAMILY else (Tiled(),)
