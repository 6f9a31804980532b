"""A dense causal LM in, a mixture of experts of a class that transformers knows out, the same function at step 0."""

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from planish.errors import UsageError
from planish.sections import MoeSection

_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def upcycled_config(config: PretrainedConfig, moe: MoeSection) -> PretrainedConfig:
    """Return the config of the mixture that `config`'s model becomes.

    Llama and Mistral become Mixtral, Qwen3 becomes Qwen3-MoE.

    Raises:
        UsageError: A model of another kind, or one with parts that the mixture's class has not.
    """
    kind = config.model_type
    if kind not in ("llama", "mistral", "qwen3"):
        raise UsageError(f"`model.moe` takes a dense llama, mistral or qwen3 model, got {kind}; leave it out.")
    lost = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    if lost:
        raise UsageError(f"`model.moe` cannot keep this model's `{lost[0]}`; leave `model.moe` out.")
    shared = {name: getattr(config, name) for name in _SHARED}
    if kind == "qwen3":
        if config.use_sliding_window:
            raise UsageError("`model.moe` cannot keep this model's `use_sliding_window`; leave `model.moe` out.")
        return Qwen3MoeConfig(
            **shared,
            num_experts=moe.experts,
            num_experts_per_tok=moe.top_k,
            moe_intermediate_size=config.intermediate_size,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    return MixtralConfig(
        **shared,
        num_local_experts=moe.experts,
        num_experts_per_tok=moe.top_k,
        sliding_window=getattr(config, "sliding_window", None),
    )


@torch.no_grad()
def upcycle(dense: PreTrainedModel, moe: MoeSection, *, seed: int) -> PreTrainedModel:
    """Return the mixture whose every expert is the dense feed-forward network, with routers drawn from `seed`.

    The chosen experts' weights add up to one, so the mixture computes what the dense model does. Drawn routers send
    different tokens to different experts, unevenly, which is what makes them part in training.

    Memory:        both models at once.
    Exactness:     equal to the dense model up to the rounding of the experts' weighted sum.

    References:
        Komatsuzaki et al., Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints, section 3.
    """
    torch.manual_seed(seed)
    mixture = AutoModelForCausalLM.from_config(upcycled_config(dense.config, moe), dtype=dense.dtype)
    weights = dense.state_dict()
    for name, param in mixture.state_dict().items():
        block, _, part = name.rpartition(".mlp.")
        match part:
            case "gate.weight":
                continue
            case "experts.gate_up_proj":
                both = [weights[f"{block}.mlp.{each}_proj.weight"] for each in ("gate", "up")]
                param.copy_(torch.cat(both).expand_as(param))
            case "experts.down_proj":
                param.copy_(weights[f"{block}.mlp.down_proj.weight"].expand_as(param))
            case _:
                param.copy_(weights[name])
    mixture.generation_config = dense.generation_config
    return mixture
