"""Config files of real models, for tests that plan without weights."""

from __future__ import annotations

from typing import Any

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rope_theta": 100000.0,
}

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "head_dim": 128,
    "num_key_value_heads": 8,
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 1000000,
}
_BLOCK_HEAD = _QWEN3 | {"num_hidden_layers": 5, "num_target_layers": 36, "dtype": "bfloat16"}
_BLOCK = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}

# What the shipped TensorRT-LLM configs name on the hub, targets and drafts.
PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
    "meta-llama/Llama-3.1-70B-Instruct": _LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "head_dim": 64,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "draft_vocab_size": 32000,
    },
    "deepseek-ai/DeepSeek-R1": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_theta": 10000,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    },
    "Qwen/Qwen3-8B": _QWEN3,
    "amd/PARD-Qwen3-0.6B": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
        "pard_token": 151670,
    },
    "z-lab/Qwen3-8B-DFlash-b16": _BLOCK_HEAD
    | {"architectures": ["DFlashDraftModel"], "block_size": 16, "dflash_config": _BLOCK},
    "deepseek-ai/dspark_qwen3_8b_block7": _BLOCK_HEAD
    | {
        "architectures": ["DSparkDraftModel"],
        "block_size": 7,
        "dflash_config": _BLOCK
        | {"projector_type": "dspark", "markov_rank": 256, "markov_head_type": "vanilla"},
    },
}
