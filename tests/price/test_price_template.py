"""A family's template says of another model of that family what fitting a table of it says."""

import pytest
import transformers

from planish.methods import Bitmap, Checkpoint, Pipelined, Plain, Plan, Tiled
from planish.plan.estimate import estimate
from planish.price.architectures import architectures
from planish.price.config import read_config
from planish.price.sharding import Gathered
from planish.price.state import parameter_bytes
from planish.price.store import preset, table_name
from planish.price.template import TEMPLATES, table_of_shape, templated_activations
from planish.sections import MeshSection, ModelSection
from planish.shapes import BatchShape, MeshShape
from planish.train.layer_table import fit_table

BATCHES = (BatchShape(context=640), BatchShape(context=96, rows=2, microbatches=3))
SMALL = {"vocab_size": 320, "num_hidden_layers": 5, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WIDTHS = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 1, "topk_group": 1}
MODELS = {
    "LlamaConfig": {"head_dim": 20},
    "Qwen3Config": {"head_dim": 16, "tie_word_embeddings": True},
    "Qwen3MoeConfig": {"head_dim": 20, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40},
    "GptOssConfig": {"head_dim": 20, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 32},
    "Gemma2Config": {"head_dim": 20, "sliding_window": 32, "query_pre_attn_scalar": 20},
    "DeepseekV3Config": LATENT | ROUTED | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "head_dim": 8},
    "Glm4MoeConfig": ROUTED | {"head_dim": 20, "first_k_dense_replace": 1},
}


def built(name):
    config = getattr(transformers, name)(**SMALL | WIDTHS | MODELS[name])
    return config, read_config(config.to_dict())


def differences(found, told):
    return {phase: told.phases[phase].peak_bytes / each.peak_bytes - 1 for phase, each in found.phases.items()}


@pytest.mark.parametrize("name", [*list(MODELS)[:2], pytest.param(list(MODELS)[2], id="moe")])
@pytest.mark.parametrize("word", ["checkpoint", "plain"])
def test_a_template_says_what_fitting_says(name, word):
    check(name, word, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("word", ["checkpoint", "keep", "plain"])
def test_every_template_says_what_fitting_says(name, word, dtype):
    check(name, word, dtype)


def check(name, word, dtype):
    config, shape = built(name)
    mixed = any(not isinstance(layer.ffn, int) for layer in shape.layers)
    boundary = {"checkpoint": Checkpoint(), "keep": Checkpoint(keep_attention=True), "plain": Plain()}[word]
    plan = Plan(boundary=boundary, dispatch=Pipelined() if mixed else Plain())
    fitted = fit_table(config, ModelSection(config="x", dtype=dtype), plan, rows=1)
    product_itemsize = next((each.product_itemsize for each in fitted.experts if each is not None), None)
    written = table_of_shape(shape, dtype=dtype, boundary=word, products_itemsize=product_itemsize)
    assert written.tensors == fitted.tensors or sorted(written.tensors, key=repr) == sorted(fitted.tensors, key=repr)
    for batch in BATCHES:
        found, told = (estimate(table, batch, plan, master=True) for table in (fitted, written))
        off = differences(found, told)
        save = off.pop("save")
        assert min(off.values()) > -2e-4
        assert max(off.values()) < 0.01, off
        assert save > -0.01 or mixed


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_built_in_models_own_table_says_the_same(dtype):
    shipped = preset("smollm2-135m")
    shape = read_config(shipped.config)
    for word, boundary in (("checkpoint", Checkpoint()), ("plain", Plain())):
        plan = Plan(boundary=boundary)
        fitted = shipped.read(table_name(plan, dtype=dtype, rows=1))
        written = table_of_shape(shape, dtype=dtype, boundary=word)
        for batch in (BatchShape(context=4096), BatchShape(context=512, rows=3, microbatches=3)):
            off = differences(*(estimate(table, batch, plan, master=True) for table in (fitted, written)))
            assert min(off.values()) > -1e-7
            assert max(off.values()) < 0.002


def test_what_ranks_gather_is_never_told_too_small():
    config = transformers.LlamaConfig(
        **SMALL | WIDTHS | {"head_dim": 24, "hidden_size": 512, "intermediate_size": 1024}
    )
    shape, mesh = read_config(config.to_dict()), MeshShape(dp=4)
    fitted = fit_table(config, ModelSection(config="x", dtype="bf16"), Plan(), rows=1, mesh=MeshSection(dp=4))
    written = table_of_shape(shape, dtype="bf16", boundary="checkpoint", mesh=mesh)
    object.__setattr__(written, "gathered", Gathered.of(shape, mesh, 2))
    object.__setattr__(written, "num_shards", 4)
    for batch in (BatchShape(context=2048), BatchShape(context=2048, microbatches=2)):
        off = differences(*(estimate(table, batch, Plan(), master=True) for table in (fitted, written)))
        off.pop("save")
        assert min(off.values()) > -1e-6
        assert off["backward"] < 0.05


def test_every_public_architecture_has_prices_on_one_rank_and_on_eight():
    for config in architectures().values():
        shape = read_config(config)
        for mesh in (MeshShape(), MeshShape(dp=8)):
            for activation in ("plain", *templated_activations(shape)):
                table = table_of_shape(shape, dtype="bf16", boundary="checkpoint", activation=activation, mesh=mesh)
                method = {"plain": Plain(), "tiled": Tiled(), "bitmap": Bitmap()}[activation]
                plan = Plan(activation=method, dispatch=Pipelined())
                found = estimate(table, BatchShape(context=4096), plan, master=True).phases["optimizer"].categories
                assert found["gradients"] >= parameter_bytes(table.tensors)


def test_every_template_is_of_a_family_that_is_known():
    from planish.price.families import FAMILIES

    names = {path.stem for path in TEMPLATES.glob("*.json")}
    assert {name.removesuffix("_mixed") for name in names} <= set(FAMILIES)
    assert len(names) >= 15
