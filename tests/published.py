# SPDX-License-Identifier: Apache-2.0
"""Configs as published, with all of their keys, and the number of parameters of each model."""

COMMON = {"torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True}
PUBLISHED = {
    "gpt2": (
        124_439_808,
        {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"]}
        | {"attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256}
        | {"initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2"}
        | {"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
        | {"resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1}
        | {"summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True}
        | {"task_specific_params": {"text-generation": {"do_sample": True}}, "vocab_size": 50257},
    ),
    "smollm2-135m": (
        134_515_008,
        COMMON
        | {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1}
        | {"hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664}
        | {"intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192}
        | {"mlp_bias": False, "model_type": "llama", "num_attention_heads": 9}
        | {"num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2}
        | {"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False}
        | {"rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True}
        | {"transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "vocab_size": 49152},
    ),
    "qwen2-0.5b": (
        494_032_768,
        COMMON
        | {"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu"}
        | {"hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 131072}
        | {"max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14}
        | {"num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06}
        | {"rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": True}
        | {"use_sliding_window": False, "vocab_size": 151936},
    ),
    "pythia-70m": (
        70_426_624,
        COMMON
        | {"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0}
        | {"hidden_act": "gelu", "hidden_size": 512, "intermediate_size": 2048}
        | {"layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox"}
        | {"num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000}
        | {"rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True}
        | {"vocab_size": 50304},
    ),
    "gemma3-270m": (
        268_098_176,
        COMMON
        | {"_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "head_dim": 256}
        | {"attention_bias": False, "attn_logit_softcapping": None, "hidden_size": 640}
        | {"final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh"}
        | {"intermediate_size": 2048, "max_position_embeddings": 32768, "vocab_size": 262144}
        | {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3}
        | {"model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 18}
        | {"num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06}
        | {"rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0}
        | {"sliding_window": 512, "use_bidirectional_attention": False},
    ),
}
