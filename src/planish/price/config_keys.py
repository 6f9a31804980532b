"""Keys of a config.json: those that sizes are read from, and those that change none."""

from collections.abc import Mapping
from typing import Any

_READ = """
attention_bias attention_head_dim attn_logit_softcapping conv_kernel decoder_sparse_step final_logit_softcapping
first_k_dense_replace full_attention_interval head_dim hidden_act hidden_activation hidden_size hybrid_override_pattern
intermediate_size kv_lora_rank layer_types layers_block_type linear_conv_kernel_dim linear_key_head_dim
linear_num_key_heads linear_num_value_heads linear_value_head_dim lm_head_bias mamba_head_dim mamba_num_heads
max_position_embeddings max_window_layers mlp_bias mlp_hidden_act mlp_only_layers model_type moe_intermediate_size
moe_shared_expert_intermediate_size n_groups n_routed_experts n_shared_experts num_attention_heads num_experts
num_experts_per_tok num_hidden_layers num_key_value_heads num_local_experts q_lora_rank qk_nope_head_dim
qk_rope_head_dim shared_expert_intermediate_size sliding_window sliding_window_pattern ssm_state_size text_config
tie_word_embeddings use_qk_norm use_sliding_window v_head_dim vocab_size
"""
_INERT = """
_attn_implementation _name_or_path _sliding_window_pattern add_cross_attention add_faster_video architectures
attention_dropout attention_multiplier attn_output_gate auto_map begin_suppress_tokens bos_token_id chunk_size
chunk_size_feed_forward classifier_dropout cross_attention_hidden_size decoder_start_token_id dtype embd_pdrop
embedding_multiplier eos_token_id ep_size expand experts_implementation finetuning_task hidden_dropout
hidden_dropout_prob id2label initializer_range input_jitter_noise is_decoder is_encoder_decoder is_llama_config label2id
layer_norm_eps layer_norm_epsilon logit_scale logits_scaling mamba_hidden_act mamba_proj_bias mlp_hidden_act
moe_layer_freq mtp_num_hidden_layers mtp_use_dedicated_embeddings n_group norm_eps norm_epsilon norm_topk_prob
num_nextn_predict_layers original_max_position_embeddings output_attentions output_hidden_states output_router_logits
pad_token_id partial_rotary_factor prefix pretraining_tp problem_type quantization_config query_pre_attn_scalar
rescale_prenorm_residual residual_in_fp32 residual_multiplier resid_pdrop return_dict rms_norm_eps rope_interleaved
rope_local_base_freq rope_parameters rope_scaling rope_theta routed_scaling_factor router_aux_loss_coef
router_jitter_noise scoring_func sep_token_id seq_aux swiglu_limit tokenizer_class topk_group topk_method torch_dtype
torchscript transformers.js_config transformers_version use_bfloat16 use_bias use_cache use_conv_bias use_mrope
vision_config z_loss_coefficient
"""
KNOWN = frozenset((_READ + _INERT).split())


def unknown_keys(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys that are neither read nor known to change no size, those of a nested text model included."""
    text = config.get("text_config")
    nested = text if isinstance(text, Mapping) else {}
    return tuple(sorted({key for key in (*config, *nested) if key not in KNOWN}))
