"""transformers' own models with packed attention equal the same models with eager attention and its full mask."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from planish.memory.ledger import Ledger
from planish.peaks.attention.kernel import BLOCK_BYTES
from planish.peaks.attention.packed import packed_attention

VOCAB = 64
ROUTED = ("qwen3-moe", "deepseek-v3", "gpt-oss")
LENGTHS = (5, 1, 9, 6)
BOUNDS = (0, 5, 6, 15, 21)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
TOKENS = torch.randint(VOCAB, (1, BOUNDS[-1]), generator=torch.Generator().manual_seed(3))


def eager_inputs(model, family):
    """Packed positions are all that eager attention needs to see documents, but gpt-oss keeps them from its masks."""
    if family != "gpt-oss":
        return {}
    embeds = torch.empty(1, BOUNDS[-1], model.config.hidden_size, dtype=model.dtype)
    arguments = {"config": model.config, "inputs_embeds": embeds, "position_ids": POSITIONS}
    arguments |= {"attention_mask": None, "cache": None}
    masks = {
        "full_attention": create_causal_mask(**arguments),
        "sliding_attention": create_sliding_window_causal_mask(**arguments),
    }
    return {"attention_mask": masks}


def loss_and_gradients(model, tokens=TOKENS, positions=POSITIONS, **inputs):
    """Return the loss over every next token of the row, in the logits' own precision, and gradients by name."""
    model.zero_grad()
    logits = model(tokens, position_ids=positions, use_cache=False, **inputs).logits
    loss = F.cross_entropy(logits[0, :-1], tokens[0, 1:])
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.fixture
def exact_softmax(monkeypatch):
    """Eager attention and routers round their softmax to float32; the oracle keeps float64."""
    softmax = F.softmax

    def in_own_precision(scores, dim=None, dtype=None, **kwargs):
        return softmax(scores, dim=dim, dtype=None if scores.dtype == torch.float64 else dtype, **kwargs)

    monkeypatch.setattr(nn.functional, "softmax", in_own_precision)


def test_loss_and_gradients_equal_eager_with_its_full_mask(family, make_model, packed_name, exact_softmax):
    model = make_model(family, torch.float64)
    loss, gradients = loss_and_gradients(model, cu_seq_lens_q=BOUNDS)
    model.set_attn_implementation("eager")
    eager_loss, eager_gradients = loss_and_gradients(model, **eager_inputs(model, family))
    torch.testing.assert_close(loss, eager_loss, atol=1e-12, rtol=0.0)
    assert gradients.keys() == eager_gradients.keys()
    for name, each in eager_gradients.items():
        torch.testing.assert_close(gradients[name], each, atol=1e-10, rtol=0.0, msg=name)


def test_documents_do_not_see_each_other(family, make_model):
    """The packed row gives the logits that each document gives alone; so does eager attention from packed positions."""
    model = make_model(family).eval()

    def logits(tokens, positions, **inputs):
        with torch.no_grad():
            return model(tokens, position_ids=positions, use_cache=False, **inputs).logits

    packed = logits(TOKENS, POSITIONS, cu_seq_lens_q=BOUNDS)
    model.set_attn_implementation("eager")
    eager = logits(TOKENS, POSITIONS, **eager_inputs(model, family))
    parts = zip(TOKENS.split(LENGTHS, 1), POSITIONS.split(LENGTHS, 1), strict=True)
    alone = torch.cat([logits(tokens, positions) for tokens, positions in parts], 1)
    torch.testing.assert_close(eager, alone)
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_less_precise_than_eager(family, make_model, dtype, exact_softmax):
    if dtype == torch.bfloat16 and family in ROUTED:
        pytest.skip("a router in bfloat16 sends tokens elsewhere for any rounding, eager's or ours")
    model = make_model(family, dtype)
    _, packed = loss_and_gradients(model, cu_seq_lens_q=BOUNDS)
    model.set_attn_implementation("eager")
    _, eager = loss_and_gradients(model, **eager_inputs(model, family))
    model = model.double()
    _, exact = loss_and_gradients(model, **eager_inputs(model, family))

    def error(gradients):
        return torch.stack(
            [(gradients[name] - each).norm() / each.norm() for name, each in exact.items() if each.any()]
        )

    assert error(packed).norm() <= 2 * error(eager).norm() + torch.finfo(dtype).eps


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(family, make_model, reentrant):
    model = make_model(family)
    loss, gradients = loss_and_gradients(model, cu_seq_lens_q=BOUNDS)
    gradients = {name: each.clone() for name, each in gradients.items()}
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    again, recomputed = loss_and_gradients(model, cu_seq_lens_q=BOUNDS)
    assert torch.equal(loss, again)
    assert all(torch.equal(gradients[name], each) for name, each in recomputed.items())


def test_bounds_as_the_tensor_of_a_padding_free_collator(make_model):
    model = make_model("llama")
    loss, _ = loss_and_gradients(model, cu_seq_lens_q=BOUNDS)
    offsets = torch.tensor(BOUNDS, dtype=torch.int32)
    extras = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}
    assert torch.equal(loss, loss_and_gradients(model, **extras)[0])


def test_generation_equals_eager(family, make_model, packed_name):
    model = make_model(family).eval()
    prompt = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(5))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    generated = model.generate(prompt, **options)
    model.set_attn_implementation("eager")
    assert torch.equal(generated, model.generate(prompt, **options))
    assert generated.shape == (2, 19)


def test_keys_that_only_a_mask_could_hide_are_refused_in_generation(make_model):
    model = make_model("llama").eval()
    prompt = torch.ones(2, 7, dtype=torch.long)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(ValueError, match="generate with a dynamic cache"):
        model.generate(prompt, attention_mask=torch.ones_like(prompt), cache_implementation="static", **options)
    sliding = make_model("gemma-3").eval()
    with pytest.raises(ValueError, match="generate with a dynamic cache"):
        sliding.generate(prompt, attention_mask=torch.ones_like(prompt), cache_implementation="static", **options)
    left_padded = torch.ones_like(prompt)
    left_padded[0, :2] = 0
    with pytest.raises(ValueError, match="without padding on the left"):
        model.generate(prompt, attention_mask=left_padded, **options)


def test_padding_on_the_right_changes_no_real_token(make_model):
    model = make_model("llama").eval()
    padded = F.pad(TOKENS[:, :9], (0, 4))
    mask = (torch.arange(13) < 9).long()[None]
    with torch.no_grad():
        torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, :9], model(TOKENS[:, :9]).logits)


@pytest.mark.parametrize("family_softcap", ["llama", "gemma-2"])
def test_autocast_computes_in_its_dtype_and_no_less(make_model, family_softcap):
    """Under autocast query and key arrive in float32, value in bfloat16; backward outside or inside it is the same."""
    model = make_model(family_softcap)
    gradients = []
    for backward_inside in (True, False):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(TOKENS, position_ids=POSITIONS, cu_seq_lens_q=BOUNDS, use_cache=False).logits.square().mean()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def peak_bytes(make_model, family, tokens, attention=None, **options):
    """Return the ledger's peak of forward and backward over `tokens` tokens in two documents."""
    model = make_model(family, **options)
    if attention is not None:
        model.set_attn_implementation(attention)
    row = torch.zeros(1, tokens, dtype=torch.long)
    positions = torch.cat([torch.arange(tokens // 4), torch.arange(tokens - tokens // 4)])[None]
    with Ledger() as ledger:
        out = model(row, position_ids=positions, cu_seq_lens_q=(0, tokens // 4, tokens), use_cache=False)
        out.logits.sum().backward()
    return max(ledger.peak_bytes.values())


def is_linear(make_model, family, attention=None):
    small, large = (peak_bytes(make_model, family, tokens, attention) for tokens in (1024, 2048))
    return large <= 2 * small + 2 * BLOCK_BYTES


def test_a_step_of_every_family_is_linear_in_the_context(family, make_model):
    assert is_linear(make_model, family)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_step_of_stock_attention_is_not(make_model, attention):
    assert not is_linear(make_model, "llama", attention)


def test_a_dry_run_of_every_family_counts_the_same_bytes(family, make_model):
    real = peak_bytes(make_model, family, 96, experts="batched_mm")
    with FakeTensorMode():
        assert peak_bytes(make_model, family, 96, experts="batched_mm") == real


class Layer(nn.Module):
    """What the adapter can see of an attention layer."""

    def __init__(self, *, is_causal=True, layer_idx=0, **config):
        super().__init__()
        self.is_causal, self.layer_idx = is_causal, layer_idx
        self.config = type("Config", (), config)()


def attend(layer=None, queries=4, keys=4, attention_mask=None, **options):
    query, key = torch.ones(1, 2, queries, 8), torch.ones(1, 2, keys, 8)
    return packed_attention(layer or Layer(), query, key, key, attention_mask, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, r"`attention_mask` must be None .* given \(1, 1, 4, 4\)"),
        ({"dropout": 0.1}, "has no dropout, got 0.1"),
        ({"is_causal": False}, r"Layer is not \(`is_causal=False`\)"),
        ({"layer": Layer(is_causal=False)}, r"Layer is not \(`is_causal=False`\)"),
        ({"layer": Layer(layer_types=["chunked_attention"])}, "has no 'chunked_attention' layer"),
        ({"layer": Layer(layer_types=["sliding_attention"])}, "keeps its sliding window in the mask alone"),
        ({"layer": Layer(sliding_window=8)}, "keeps its sliding window in the mask alone"),
        ({"output_attentions": True}, "never forms its weights"),
        ({"position_bias": torch.ones(1, 2, 4, 4)}, "does not know the tensor `position_bias`"),
        ({"keys": 9, "position_ids": torch.tensor([[0, 1, 2, 3]])}, "puts at 3"),
        ({"keys": 9, "position_ids": torch.tensor([[0, 1, 2, 3]]), "sliding_window": 6}, "puts at 3"),
    ],
)
def test_what_cannot_be_exact_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        attend(**options)


def test_what_changes_nothing_is_accepted():
    out, weights = attend(
        layer=Layer(layer_types=["full_attention", "sliding_attention"], layer_idx=1),
        sliding_window=8,
        position_ids=torch.tensor([[0, 1, 2, 3]]),
        num_items_in_batch=torch.tensor(4),
        output_attentions=False,
        output_router_logits=True,
        use_cache=True,
        is_causal=True,
    )
    assert (out.shape, weights) == ((1, 4, 2, 8), None)
    for window in (None, 0, 6):
        assert attend(keys=9, position_ids=torch.tensor([[5, 6, 7, 8]]), sliding_window=window)[0].shape == (1, 4, 2, 8)
    assert attend(keys=9, position_ids=torch.tensor([[96, 97, 98, 99]]), sliding_window=6)[0].shape == (1, 4, 2, 8)


def test_the_room_needs_no_transformers():
    code = "import sys, planish.peaks.attention.packed; print('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
