"""No bytes grow with the square of the sequence, and a dry run on fakes counts the same bytes as the real one."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.ledger import Ledger
from planish.peaks.attention.kernel import BLOCK_BYTES
from planish.peaks.attention.packed import causal_attention

HEADS, KV_HEADS, WIDTH = 8, 2, 16
# Blocks, masks and tiles: what may be held beside terms that are linear in S.
FIXED_BYTES = 4 * BLOCK_BYTES
KINDS = {
    "one document": {},
    "documents": {"cu_seq_lens": lambda tokens: (0, tokens // 3, tokens // 2, tokens)},
    "window": {"window": 100},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 100, "sinks": True},
    "softcap": {"softcap": 5.0},
    "narrow value": {"value_width": 8},
    "wide value": {"value_width": 24},
}


def run(attention, tokens, dtype, *, value_width=WIDTH, sinks=False, cu_seq_lens=None, **options):
    def draw(heads, width):
        return torch.randn(1, tokens, heads, width, dtype=dtype).transpose(1, 2).requires_grad_()

    query, key, value = draw(HEADS, WIDTH), draw(KV_HEADS, WIDTH), draw(KV_HEADS, value_width)
    if sinks:
        options["sinks"] = torch.zeros(HEADS, dtype=dtype, requires_grad=True)
    if cu_seq_lens is not None:
        options["cu_seq_lens"] = cu_seq_lens(tokens)
    attention(query, key, value, **options).sum().backward()


def peak_bytes(*args, **kwargs):
    with Ledger() as ledger:
        run(*args, **kwargs)
    return max(ledger.peak_bytes.values())


def grows_linearly(attention, dtype, **options):
    small, large = (peak_bytes(attention, tokens, dtype, **options) for tokens in (2048, 4096))
    return large <= 2 * small + FIXED_BYTES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peak_is_linear_in_the_sequence(kind, dtype):
    assert grows_linearly(causal_attention, dtype, **KINDS[kind])


def test_a_mask_would_be_found_out():
    def masked(query, key, value):
        mask = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    assert not grows_linearly(masked, torch.float32)


def test_masks_behind_a_cache_keep_to_their_bytes():
    query, key = torch.randn(1, 1, 256, 2), torch.randn(1, 1, 2**16, 2)
    with Ledger() as ledger:
        causal_attention(query, key, key)
    # Beside the mask: the booleans that it is made from, three bytes a cell to its four.
    assert max(ledger.peak_bytes.values()) <= 2 * BLOCK_BYTES


def test_sinks_are_folded_in_parts_of_fixed_bytes():
    """The sinks' float32 products with the whole output would be 32 MiB here."""

    def documents(tokens):
        return tuple(range(0, tokens + 1, 64))

    without, folded = (
        peak_bytes(causal_attention, 2**15, torch.bfloat16, cu_seq_lens=documents, sinks=sinks)
        for sinks in (False, True)
    )
    assert folded - without <= 2 * BLOCK_BYTES


def test_grouped_heads_are_read_in_place():
    """Neither keys nor values nor their gradients are ever repeated for each query head."""
    few = peak_bytes(causal_attention, 2048, torch.float32)
    query_bytes = 2048 * HEADS * WIDTH * 4
    # Alive at once in backward: query, output and both gradients; key, value and their gradients; lse; the upstream.
    assert few <= 4 * query_bytes + 4 * query_bytes * KV_HEADS // HEADS + 2048 * HEADS * 4 + query_bytes // 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dry_run_on_fakes_counts_the_same_bytes(kind, dtype):
    real = peak_bytes(causal_attention, 640, dtype, **KINDS[kind])
    with FakeTensorMode():
        assert peak_bytes(causal_attention, 640, dtype, **KINDS[kind]) == real
