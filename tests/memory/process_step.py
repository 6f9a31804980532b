"""A training step for a process of its own; imports neither pytest nor hypothesis."""

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM


def train(ledger, *, tokens, vocab):
    """Take two steps of a checkpointed Llama whose logits are most of the peak."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, vocab, (1, tokens))
    with ledger.watch(model, head=model.lm_head):
        for step in range(2):
            ledger.start_step(step)
            optimizer.zero_grad(set_to_none=True)
            with ledger.phase("forward"):
                loss = F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:])
            with ledger.phase("backward"):
                loss.backward()
            del loss
            with ledger.phase("optimizer"):
                optimizer.step()
