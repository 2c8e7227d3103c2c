"""Configurations of other kinds: every spelling a published file may use, and the answer it must give."""

from __future__ import annotations

from typing import Any

import pytest

from tests.checkpoints.conftest import LLAMA
from trtspec.checkpoints.facts import ArchitectureFacts, facts_from

INT8 = {"num_bits": 8, "type": "int"}
HYBRID = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}


def facts(**keys: Any) -> ArchitectureFacts:
    return facts_from(LLAMA | keys, "config.json")


def kinds(found: ArchitectureFacts) -> str:
    """One letter per layer: f, s, m, l, n."""
    return "".join(kind[0] for kind in found.layer_kinds)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {
                "layer_types": [
                    "linear_attention",
                    "full_attention",
                    "sliding_attention",
                    "chunked_attention",
                ],
                "sliding_window": 8,
            },
            "lfss",
        ),
        ({"layers_block_type": ["mamba", "attention", "moe", "mlp"]}, "lfnn"),
        ({"hybrid_override_pattern": "M*-E", "num_hidden_layers": None}, "lfnn"),
        ({"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 16}, "llsl"),
        ({"hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window": 8}, "fssf"),
        ({"attn_type_list": [0, 0, 1, 0]}, "llfl"),
        ({"linear_attn_config": {"full_attn_layers": [2, 4], "kda_layers": [1, 3]}}, "lflf"),
        ({"attn_layer_indices": [1]}, "lfll"),
        ({"full_attn_idxs": [0, 3]}, "fllf"),
        ({"full_attention_interval": 2}, "lflf"),
        ({"attn_layer_period": 4, "attn_layer_offset": 2}, "llfl"),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, "sfsf"),
        ({"sliding_window": 8, "sliding_window_pattern": "LLG"}, "ssfs"),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, "fffs"),
        ({"sliding_window": 8, "use_sliding_window": False}, "ffff"),
        ({"model_type": "mistral", "sliding_window": 8}, "ssss"),
        ({"model_type": "gemma2", "sliding_window": 8}, "sfsf"),
        ({"model_type": "llama4_text", "attention_chunk_size": 8}, "sssf"),
        ({"attention_chunk_size": 8, "no_rope_layers": [1, 0, 1, 0]}, "sfsf"),
        ({"model_type": "mamba2"}, "llll"),
        ({"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}, "mmmm"),
    ],
)
def test_layer_patterns(keys: dict[str, Any], expected: str) -> None:
    assert kinds(facts(**keys)) == expected


def test_a_window_without_a_pattern_is_counted_full_and_said() -> None:
    found = facts(model_type="brandnew", sliding_window=8)
    assert kinds(found) == "ffff"
    assert any("which layers slide is not known" in w for w in found.warnings)


def test_a_searched_architecture_has_blocks_without_attention() -> None:
    """DeciLM: the group per block, a null KV count at the top, FFN widths as multiples rounded up to 256."""
    blocks = [
        {"attention": {"n_heads_in_group": 4, "no_op": False}, "ffn": {"ffn_mult": 2.0}},
        {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 0.5}},
        {"attention": {"n_heads_in_group": 8, "no_op": False}, "ffn": {"no_op": True}},
        {"attention": {"replace_with_linear": True}, "ffn": {"intermediate_size": 32}},
    ]
    found = facts(num_key_value_heads=None, block_configs=blocks, model_type="nemotron-nas")
    assert kinds(found) == "fnfn"
    assert [(g.kind, g.layers, g.group) for g in found.attention] == [
        ("full", 1, 4),
        ("none", 2, None),
        ("full", 1, 8),
    ]
    assert found.group == 8
    assert found.parameters is not None


OLDER: dict[str, tuple[dict[str, Any], int, int]] = {
    "gpt2": ({"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 32}, 1, 3),
    "falcon": ({"hidden_size": 64, "n_layer": 2, "n_head": 8, "multi_query": True}, 8, 2),
    "falcon-new": (
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_kv_heads": 2,
            "multi_query": True,
            "new_decoder_architecture": True,
            "ffn_hidden_size": 64,
        },
        4,
        2,
    ),
    "dbrx": (
        {
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 8,
            "attn_config": {"kv_n_heads": 4},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
        2,
        2,
    ),
    "chatglm": (
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_attention_heads": 8,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "padded_vocab_size": 100,
            "ffn_hidden_size": 32,
            "kv_channels": 8,
        },
        4,
        2,
    ),
    "openelm": (
        {
            "model_dim": 64,
            "num_transformer_layers": 2,
            "num_query_heads": [8, 4],
            "num_kv_heads": [2, 2],
            "head_dim": 8,
            "intermediate_size": [32, 64],
        },
        4,
        2,
    ),
    "step3": (
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_attention_groups": 2,
            "head_dim": 8,
            "intermediate_size": 32,
        },
        4,
        2,
    ),
}


@pytest.mark.parametrize("model_type", OLDER)
def test_older_and_stranger_key_names(model_type: str) -> None:
    keys, group, layers = OLDER[model_type]
    keys = {
        "vocab_size": 100,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "model_type": model_type,
    } | keys
    found = facts_from(keys, "config.json")
    assert (found.group, found.layers) == (group, layers)
    assert found.vocab_size == 100
    assert found.parameters is not None


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"num_nextn_predict_layers": 1}, 1),
        ({"mtp_num_hidden_layers": 2}, 2),
        ({"num_mtp_modules": 3, "use_mtp": True}, 3),
        ({"num_mtp_modules": 3, "use_mtp": False}, 0),
        ({"mtp_hybrid_override_pattern": "*E"}, 1),
        ({"mtp_layers_block_type": ["attention", "moe"]}, 1),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": None}, 0),
        ({}, 0),
    ],
)
def test_mtp_spellings(keys: dict[str, Any], layers: int) -> None:
    assert facts(**keys).mtp_layers == layers


def test_a_wrapper_keeps_everything_under_text_config() -> None:
    inner = LLAMA | {"model_type": "inner_text", "mtp_num_hidden_layers": 1, "eos_token_id": 5}
    found = facts_from(
        {
            "model_type": "outer",
            "text_config": inner,
            "eos_token_id": [7, 8],
            "vision_config": {"hidden_size": 9},
        },
        "c",
    )
    assert (found.model_type, found.layers, found.mtp_layers, found.hidden_size) == ("inner_text", 4, 1, 64)
    assert found.eos_token_ids == (7, 8)


def test_layers_that_differ_bind_by_the_largest_group() -> None:
    """Sliding layers 8/4, full layers 8/1: the full ones fill the tile first."""
    found = facts(
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        num_key_value_heads=4,
        num_global_key_value_heads=1,
        global_head_dim=16,
    )
    assert [(g.kind, g.group, g.head_dim) for g in found.attention] == [("sliding", 2, 8), ("full", 8, 16)]
    assert found.group == 8
    assert found.as_json()["tile_draft_length"]["128"] == 15
    assert any("layers differ in their group" in w for w in found.warnings)


def test_sliding_layers_may_have_their_own_heads() -> None:
    found = facts(
        hybrid_layer_pattern=[0, 1, 1, 1],
        sliding_window=8,
        num_attention_heads=16,
        num_key_value_heads=1,
        head_dim=8,
        swa_num_attention_heads=16,
        swa_num_key_value_heads=2,
    )
    assert {g.kind: g.group for g in found.attention} == {"full": 16, "sliding": 8}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks"),
    [
        (28, 4, [7, 7, 7, None]),
        (40, 10, [4, 4, None, None]),
        (9, 3, [3, None, None, None]),
        (32, 2, [16, 16, 8, 4]),
        (4, 1, [4, 2, 1, None]),
        (64, 8, [8, 8, 8, 8]),
    ],
)
def test_group_on_one_rank(heads: int, kv_heads: int, ranks: list[int | None]) -> None:
    """KV heads split while there are enough, then they are replicated; a count that does not divide gives None."""
    found = facts(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8)
    assert list(found.as_json()["tensor_parallel"].values()) == ranks


def test_latent_attention_ignores_the_configs_kv_heads() -> None:
    """DeepSeek says 128 KV heads: taken at its word the rule would give D = 127 instead of 0."""
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    found = facts(num_attention_heads=128, num_key_value_heads=128, **latent)
    result = found.as_json()
    assert (result["group"], result["tile_draft_length"]["128"]) == (128, 0)
    assert result["tile_draft_length"]["64"] is None
    assert result["tensor_parallel"] == {"1": 128, "2": 64, "4": 32, "8": 16}
    assert any("its own kernels" in w for w in found.warnings)


def test_no_attention_at_all_gives_nulls() -> None:
    result = facts(model_type="mamba2", **HYBRID).as_json()
    assert result["group"] is None
    assert result["tile_draft_length"]["128"] is None
    assert result["tile_exact"] is False
    assert result["kv_bytes_per_token"] == 0
    assert result["tensor_parallel"]["1"] is None


def test_head_dim_is_never_divided_where_it_is_stated() -> None:
    found = facts(hidden_size=80, head_dim=32)
    assert found.attention[0].head_dim == 32
    assert any("head_dim is as stated" in w for w in found.warnings)


@pytest.mark.parametrize("group_size", [16, None])
def test_hf_quant_config_forms(folder, group_size: int | None) -> None:
    from trtspec.checkpoints.facts import read_facts

    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "model.layers.0*"],
    }
    if group_size:
        quantization["group_size"] = group_size
    found = read_facts(folder(LLAMA, hf_quant_config={"quantization": quantization}))
    assert found.quantization.algorithm == "NVFP4"
    assert found.kv_dtype == "fp8"
    ffn = found.weights.of("ffn")
    # one of four layers stays 16 bit
    assert ffn.bytes / ffn.parameters == pytest.approx((3 * 0.5625 + 2) / 4, rel=0.01)
    assert found.weights.of("lm_head").bytes == 2.0 * found.weights.of("lm_head").parameters


def test_missing_exclude_modules_are_said(folder) -> None:
    from trtspec.checkpoints.facts import read_facts

    found = read_facts(folder(LLAMA, hf_quant_config={"quantization": {"quant_algo": "FP8"}}))
    assert any("exclude_modules" in w for w in found.warnings)


@pytest.mark.parametrize(
    ("quantization", "size", "compute"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.52, "bf16"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0, "bf16"),
        (
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": []}},
            1.0,
            "fp8",
        ),
        ({"config_groups": {"g": {"weights": INT8, "input_activations": INT8}}}, 1.0, "int8"),
        ({"quant_method": "something-new"}, None, "bf16"),
    ],
)
def test_inline_quantization_forms(quantization: dict[str, Any], size: float | None, compute: str) -> None:
    found = facts(quantization_config=quantization)
    assert found.quantization.compute == compute
    if size is None:
        assert found.quantization.weight_bytes is None
        assert any("not known" in w for w in found.warnings)
    else:
        assert found.quantization.weight_bytes == pytest.approx(size, abs=0.02)


def test_eos_comes_from_generation_config_first(folder) -> None:
    from trtspec.checkpoints.facts import read_facts

    path = folder(LLAMA | {"eos_token_id": 3}, generation_config={"eos_token_id": [3, 9]})
    assert read_facts(path).eos_token_ids == (3, 9)
    assert facts(eos_token_id=None).eos_token_ids == ()


def test_tiedness_without_a_key_is_read_from_the_files(folder) -> None:
    from trtspec.checkpoints.facts import read_facts

    config = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
    table = {"model.embed_tokens.weight": ("BF16", [100, 64])}
    untied = read_facts(folder(config, table | {"lm_head.weight": ("BF16", [100, 64])}))
    assert untied.tied_embeddings is False
    tied = read_facts(folder(config, table))
    assert tied.tied_embeddings is True
    assert any("decided by the files" in w for w in tied.warnings)
    assert untied.parameters - tied.parameters == 100 * 64
    alone = facts_from(config, "config.json")
    assert alone.tied_embeddings is None
    assert alone.parameters is None


def test_stored_bytes_replace_computed_ones(folder) -> None:
    from trtspec.checkpoints.facts import read_facts

    tensors = {
        "model.embed_tokens.weight": ("F32", [100, 64]),
        "lm_head.weight": ("F32", [100, 64]),
        "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [128, 64]),
        "model.layers.4.eh_proj.weight": ("BF16", [64, 128]),
    }
    found = read_facts(folder(LLAMA, tensors))
    assert found.weights.of("lm_head").bytes == 100 * 64 * 4
    assert found.weights.of("ffn").bytes == 128 * 64
    assert found.mtp_layers == 1  # layer 4 of a 4-layer model holds an eh_proj
    assert any("MTP tensors that the configuration does not name" in w for w in found.warnings)


def test_named_mtp_layers_without_tensors_are_said(folder) -> None:
    from trtspec.checkpoints.facts import read_facts

    path = folder(LLAMA | {"num_nextn_predict_layers": 1}, {"model.embed_tokens.weight": ("BF16", [100, 64])})
    assert any("the files hold none" in w for w in read_facts(path).warnings)


@pytest.mark.parametrize(
    ("keys", "moe_layers"),
    [
        ({"first_k_dense_replace": 1}, 3),
        ({"decoder_sparse_step": 2}, 2),
        ({"mlp_only_layers": [0, 3]}, 2),
        ({"moe_layer_freq": [0, 1, 1, 1]}, 3),
        ({"interleave_moe_layer_step": 2}, 2),
        ({"expert_layer_period": 2, "expert_layer_offset": 1}, 2),
        ({"moe_layers_enum": "1,2"}, 2),
        ({"num_dense_layers": 2}, 2),
        ({}, 4),
    ],
)
def test_which_layers_are_mixtures(keys: dict[str, Any], moe_layers: int) -> None:
    found = facts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, **keys)
    assert found.weights.moe_layers == moe_layers
    assert found.weights.of("expert").parameters == moe_layers * 8 * 3 * 64 * 32
    assert found.weights.active_parameters < found.weights.parameters


def test_rope_spellings() -> None:
    old = facts(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})
    new = facts(
        rope_theta=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4,
            "original_max_position_embeddings": 128,
            "beta_fast": 32,
        },
    )
    assert old.rope.same_schedule(new.rope)
    per_layer = facts(
        rope_theta=None,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5.0},
            "sliding_attention": {"rope_type": "default"},
        },
    )
    assert (per_layer.rope.kind, per_layer.rope.theta) == ("linear", 5.0)
    assert not facts(rope_scaling={"rope_type": "foo"}).rope.known
    assert facts(rope_scaling={"type": "mrope", "mrope_section": [1, 2]}).rope.kind == "default"


def test_recurrent_models_of_every_family_have_sizes() -> None:
    """Known totals: Mamba-2 2.7B, Jamba 52B, Granite-4.0-H-1B."""
    mamba2 = {
        "model_type": "mamba2",
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "num_heads": 80,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "expand": 2,
        "vocab_size": 50288,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    assert facts_from(mamba2, "c").parameters == pytest.approx(2.7e9, rel=0.02)
    jamba = {
        "model_type": "jamba",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "intermediate_size": 14336,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_dt_rank": 256,
        "vocab_size": 65536,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    found = facts_from(jamba, "c")
    assert found.parameters == pytest.approx(51.6e9, rel=0.01)
    assert found.weights.active_parameters == pytest.approx(12e9, rel=0.05)
    granite = {
        "model_type": "granitemoehybrid",
        "hidden_size": 1536,
        "num_hidden_layers": 40,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
        "shared_intermediate_size": 4096,
        "num_local_experts": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": "auto",
        "mamba_expand": 2,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "vocab_size": 100352,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    assert facts_from(granite, "c").parameters == pytest.approx(1.46e9, rel=0.01)
    assert facts_from(granite, "c").recurrent_state_elements == 36 * 48 * 64 * (128 + 4)


def test_experts_in_a_latent_space() -> None:
    """Nemotron 3 Super: 512 experts of 2688 on a latent width of 1024, about 120B in all."""
    keys = {
        "model_type": "nemotron_h",
        "hidden_size": 4096,
        "hybrid_override_pattern": "ME" * 40 + "*" * 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "n_routed_experts": 512,
        "num_experts_per_tok": 22,
        "moe_intermediate_size": 2688,
        "moe_latent_size": 1024,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 5376,
        "vocab_size": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    assert facts_from(keys, "c").parameters == pytest.approx(120e9, rel=0.03)


def test_shapes_that_no_key_gives_come_from_the_files(folder) -> None:
    from trtspec.checkpoints.facts import read_facts

    config = LLAMA | {"layer_types": ["kda", "full_attention"] * 2}
    tensors = {
        "model.layers.0.linear_attn.q_proj.weight": ("BF16", [64, 64]),
        "model.layers.1.mlp.up_proj.weight": ("F32", [128, 64]),
    }
    found = read_facts(folder(config, tensors))
    assert found.weights.of("linear_attention").parameters == 64 * 64
    assert found.weights.of("ffn").bytes == 128 * 64 * 4
    assert found.parameters is None
    assert facts_from(config, "c").weights is None
