"""A tiny Llama whose attention needs no mask, and one training step of it in the ledger's phases."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

VOCAB, TOKENS = 320, 96


def causal_without_mask(module, query, key, value, attention_mask, scaling=None, **_):
    assert attention_mask is None
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


class TinyRun:
    """A model, its optimizer and its batch, made inside whatever modes are active."""

    def __init__(self, *, checkpointed=False, dtype=torch.float32, attention="sdpa", **optimizer):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
            attn_implementation=attention,
            use_cache=False,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            self.model = LlamaForCausalLM(config).train()
        finally:
            torch.set_default_dtype(before)
        if checkpointed:
            self.model.activation_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **optimizer)
        self.ids = torch.randint(0, VOCAB, (2, TOKENS))

    @property
    def head(self):
        return self.model.lm_head

    def state(self):
        return [each for states in self.optimizer.state.values() for each in states.values()]

    def step(self, ledger):
        """Take one step; only parameters, gradients and optimizer state outlive it."""
        self.optimizer.zero_grad(set_to_none=True)
        with ledger.phase("forward"):
            hidden = self.model.model(self.ids).last_hidden_state
        with ledger.phase("head"):
            logits = self.head(hidden)[:, :-1].flatten(0, 1).float()
            loss = F.cross_entropy(logits, self.ids[:, 1:].flatten())
            del hidden, logits
        with ledger.phase("backward"):
            loss.backward()
        with ledger.phase("optimizer"):
            self.optimizer.step()
            ledger.adopt(self.state(), "optimizer state", owner="AdamW")

    def evaluate(self, ledger):
        with torch.no_grad(), ledger.phase("eval"):
            self.model(self.ids)

    def save(self, ledger):
        with ledger.phase("save"):
            for parameter in self.model.parameters():
                parameter.detach().float().clone()


@pytest.fixture(scope="session")
def tiny_run():
    """Return the class of a tiny run; its attention "causal_without_mask" is registered."""
    AttentionInterface.register("causal_without_mask", causal_without_mask)
    return TinyRun


def storage_bytes(tensors):
    """Return the bytes of the distinct storages of `tensors`."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.fixture(scope="session")
def bytes_of():
    return storage_bytes
