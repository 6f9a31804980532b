"""Feed-forward networks of transformers' own models run packed or in tiles, give the same bits, and are put back."""

from dataclasses import replace

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from planish.errors import UsageError
from planish.methods import Bitmap, Checkpoint, Plain, Plan, Tiled
from planish.models.feed_forward import find_feed_forwards
from planish.models.install import install

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
HYBRID = {"layers_block_type": ["attention", "mlp", "moe"], "num_hidden_layers": 3, "n_routed_experts": 4}
SPARSE = {
    "Nemotron": {},
    "NanoChat": {},
    "Arcee": {"mlp_bias": True},
    "BitNet": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "NemotronH": HYBRID | {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24},
    "Persimmon": {},
    "Jais2": {},
}
DENSE = {
    "Llama": {},
    "Gemma2": {},
    "Phi3": {},
    "Phi": {},
    "GPTNeoX": {},
    "Starcoder2": {"embedding_dropout": 0.0, "residual_dropout": 0.0},
    "GPT2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}


def draw(family, **changes):
    config = getattr(transformers, f"{family}Config")(**SIZES | SPARSE.get(family, DENSE.get(family, {})) | changes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def step(model):
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def assert_same_bits(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    different = [name for name, grad in expected[1].items() if not torch.equal(found[1][name], grad)]
    assert not different


@pytest.mark.parametrize("family", SPARSE)
def test_relu_networks_run_packed_bit_for_bit_and_are_put_back(family):
    model = draw(family)
    before, names = step(model), list(model.state_dict())
    for boundary in (Plain(), Checkpoint()):
        plan = replace(Plan.plain(), activation=Bitmap(), boundary=boundary)
        installed = install(model, plan, tokens=24)
        sparse = [each.name for each in find_feed_forwards(model) if each.formula is not None]
        assert list(installed.keepers) == sparse
        assert_same_bits(step(model), before)
        assert {keeper.last.kept for keeper in installed.keepers.values()} == {"packed"}
        assert all(0.3 < keeper.last.density < 0.7 for keeper in installed.keepers.values())
        assert list(model.state_dict()) == names
        installed.undo()
        assert all(keeper.arena is None for keeper in installed.keepers.values())
        assert all("forward" not in module.__dict__ for module in model.modules())
        assert_same_bits(step(model), before)


@pytest.mark.parametrize("family", [*SPARSE, *DENSE])
def test_any_network_runs_in_one_tile_bit_for_bit_and_in_several_up_to_rounding(family):
    model = draw(family)
    before = step(model)
    for tile_bytes, boundary in ((2**20, Plain()), (48 * 4 * 5, Checkpoint())):
        installed = install(model, replace(Plan.plain(), activation=Tiled(tile_bytes=tile_bytes), boundary=boundary))
        found = step(model)
        installed.undo()
        if tile_bytes == 2**20:
            assert_same_bits(found, before)
            continue
        assert found[0].item() == pytest.approx(before[0].item(), rel=1e-6)
        for name, grad in before[1].items():
            assert torch.allclose(found[1][name], grad, rtol=1e-4, atol=1e-5 * grad.abs().max().item() + 1e-9), name


def test_t5_runs_packed_in_encoder_and_decoder():
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).train()
    before = step(model)
    installed = install(model, replace(Plan.plain(), activation=Bitmap(arena_bytes=2**20)))
    assert len(installed.keepers) == 4
    assert_same_bits(step(model), before)
    assert {keeper.last.kept for keeper in installed.keepers.values()} == {"packed"}


def test_what_cannot_be_replaced_is_refused_by_name():
    bitmap = replace(Plan.plain(), activation=Bitmap())
    for model, plan, said in (
        (draw("Llama"), bitmap, "LlamaForCausalLM has not; use tiled"),
        (draw("Nemotron"), bitmap, "needs `arena_bytes`, or `tokens`"),
        (
            draw("Qwen3Moe", mlp_only_layers=[], num_experts=4),
            replace(bitmap, activation=Tiled()),
            "has no feed-forward",
        ),
        (draw("GPT2", resid_pdrop=0.1), replace(bitmap, activation=Tiled()), "h.0.mlp drops activations at random"),
    ):
        with pytest.raises(UsageError, match=said):
            install(model, plan)
        assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_network_that_computes_something_else_is_refused():
    model = draw("Nemotron")

    class Scaled(type(model.model.layers[0].mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    model.model.layers[1].mlp = Scaled(model.config)
    with pytest.raises(UsageError, match=r"layers.1.mlp \(Scaled\) computes something else"):
        install(model, replace(Plan.plain(), activation=Bitmap()), tokens=24)


def test_the_plan_goes_into_a_run_file_and_comes_back():
    for activation in (Tiled(tile_bytes=2**20), Bitmap(), Bitmap(arena_bytes=3 * 2**30)):
        plan = Plan(activation=activation)
        assert Plan.from_toml(plan.to_toml()) == plan
    assert Plan.from_toml('[plan.activation]\nmethod = "bitmap"\n').activation == Bitmap()
    with pytest.raises(UsageError, match=r"plan\.activation"):
        Plan.from_toml('[plan.activation]\nmethod = "sparse"\n')
