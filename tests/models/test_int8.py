"""Int8 weights go to the run's device one by one: it never holds the wide ones, and what was tied stays tied."""

import pytest
import torch

from planish.errors import UsageError
from planish.methods import Apollo
from planish.models.int8 import settle
from planish.optim import quantize_weights
from planish.peaks.optim.int8_weight import Int8Weight

OPTIM = Apollo(weights="int8")


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_inside_layers_are_int8_and_the_rest_is_moved_as_it_is(tiny_model, tied):
    model = settle(tiny_model(dtype=torch.bfloat16, tie_word_embeddings=tied), OPTIM, torch.device("meta"))
    for name, param in model.named_parameters():
        assert param.device.type == "meta"
        assert isinstance(param, Int8Weight) == (".layers." in name and "norm" not in name), name
        assert param.dtype == torch.bfloat16
        assert param.requires_grad
    assert all(buffer.device.type == "meta" for buffer in model.buffers())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_each_wide_weight_goes_once_it_is_replaced(tiny_model):
    """No reference is left to any of them when the next one is made."""
    model = tiny_model(dtype=torch.bfloat16)
    layers = model.model.layers
    modules = [layers[0].mlp.up_proj, layers[1].mlp.up_proj]
    alive = [torch._C._WeakTensorRef(module.weight) for module in modules]
    quantize_weights(modules)
    assert all(each.expired() for each in alive)
    assert quantize_weights([model.lm_head, model.model.embed_tokens]) == [model.lm_head.weight]


def test_nothing_happens_to_a_run_that_does_not_ask(tiny_model):
    model = tiny_model()
    before = list(model.parameters())
    assert settle(model, Apollo(), torch.device("cpu")) is model
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


def test_experts_are_refused_by_name(tiny_model):
    with pytest.raises(UsageError, match=r"int8 takes weights of linear layers, and `model.layers.0.mlp.experts"):
        settle(tiny_model("qwen3-moe"), OPTIM, torch.device("cpu"))
