"""Draft-head folders as people publish them: right ones accepted, wrong ones refused with both numbers named."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtspec.checkpoints.head_tensors import draft_to_target
from trtspec.checkpoints.heads import HeadFacts, inspect_model, medusa_tree, read_head
from trtspec.checkpoints.safetensors_header import read_folder
from trtspec.errors import ConfigError, TrtspecError

# hidden 4, two heads of 4, one KV head: the first layer takes 2 × hidden.
EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def layer(
    index: int, width: int, *, prefix: str = "layers", heads: int = 2, head_dim: int = 4, hidden: int = 4
) -> dict[str, Any]:
    """Attention weights of one layer with the given input width."""
    base = f"{prefix}.{index}.self_attn" if prefix == "layers" else f"{prefix}.self_attn"
    return {
        f"{base}.q_proj.weight": ("BF16", [heads * head_dim, width]),
        f"{base}.k_proj.weight": ("BF16", [head_dim, width]),
        f"{base}.v_proj.weight": ("BF16", [head_dim, width]),
        f"{base}.o_proj.weight": ("BF16", [hidden, heads * head_dim]),
    }


def ints(values: list[int]) -> tuple[str, list[int], bytes]:
    return ("I64", [len(values)], struct.pack(f"<{len(values)}q", *values))


def mask(true: set[int], size: int) -> tuple[str, list[int], bytes]:
    return ("BOOL", [size], bytes(int(i in true) for i in range(size)))


Make = Callable[..., Path]


def test_the_first_layer_takes_twice_the_hidden_size(folder: Make) -> None:
    one = read_head(folder(EAGLE3, layer(0, 8)))
    assert one.method == "eagle3"
    two = read_head(folder(EAGLE3 | {"num_hidden_layers": 2}, layer(0, 8) | layer(1, 4)))
    assert two.decoder is not None
    assert two.decoder.layers == 2
    with pytest.raises(ConfigError, match=r"EAGLE-1 style or plain decoder layer.*input width 4, expected 8"):
        read_head(folder(EAGLE3, layer(0, 4)))
    with pytest.raises(ConfigError, match="layer 1 takes input width 8, expected 4"):
        read_head(folder(EAGLE3 | {"num_hidden_layers": 2}, layer(0, 8) | layer(1, 8)))


def test_midlayer_is_layer_zero(folder: Make) -> None:
    head = read_head(folder(EAGLE3, layer(0, 8, prefix="midlayer")))
    assert head.method == "eagle3"
    with pytest.raises(ConfigError, match="input width 4"):
        read_head(folder(EAGLE3, layer(0, 4, prefix="midlayer")))


GOOD_MAP = {
    "lm_head.weight": ("BF16", [5, 4]),
    "d2t": ints([0, 0, 3, 3, 6]),
    "t2d": mask({0, 1, 5, 6, 10}, 12),
}
REDUCED = EAGLE3 | {"draft_vocab_size": 5}


def test_a_reduced_vocabulary_maps_by_offsets(folder: Make) -> None:
    path = folder(REDUCED, layer(0, 8) | GOOD_MAP)
    assert read_head(path).draft_vocab_size == 5
    tensors = read_folder(path)
    assert tensors is not None
    assert draft_to_target(tensors["d2t"]) == [0, 1, 5, 6, 10]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"d2t": ints([0, 0, 3, 3, 9])}, "draft id 4 to 13, outside the target vocabulary of 12"),
        ({"t2d": mask({0, 1, 5}, 12)}, "t2d marks 3 tokens, d2t maps 5"),
        ({"lm_head.weight": ("BF16", [12, 4])}, r"\[12, 4\], draft_vocab_size is 5"),
        ({"d2t": ints([0, 0, 3])}, "d2t maps 3 tokens, the draft vocabulary has 5"),
        ({"d2t": ints([0, 0, 3, 2, 6])}, "not strictly increasing"),
        ({"t2d": mask({0, 1, 5, 6, 11}, 12)}, "different target tokens"),
        ({"d2t": ("F32", [5])}, "expected integers"),
    ],
)
def test_contradictory_vocabulary_maps_are_refused(folder: Make, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_head(folder(REDUCED, layer(0, 8) | GOOD_MAP | change))


def test_a_reduced_vocabulary_without_a_map_is_refused(folder: Make) -> None:
    with pytest.raises(ConfigError, match="no d2t map"):
        read_head(folder(REDUCED, layer(0, 8) | {"lm_head.weight": ("BF16", [5, 4])}))


def test_equal_vocabularies_need_no_map(folder: Make) -> None:
    head = read_head(
        folder(EAGLE3 | {"draft_vocab_size": 12}, layer(0, 8) | {"lm_head.weight": ("BF16", [12, 4])})
    )
    assert head.draft_vocab_size == 12


def test_head_dim_is_read_from_the_weights(folder: Make) -> None:
    wide = EAGLE3 | {"hidden_size": 10, "num_attention_heads": 4}
    tensors = layer(0, 20, heads=4, hidden=10)
    assert read_head(folder(wide, tensors)).decoder is not None
    missing = {name: value for name, value in wide.items() if name != "head_dim"}
    assert any(
        "4 by q_proj (16/4), not hidden/heads" in w for w in read_head(folder(missing, tensors)).warnings
    )
    with pytest.raises(ConfigError, match="head_dim is 2, but q_proj's 16 rows over 4 heads give 4"):
        read_head(folder(wide | {"head_dim": 2}, tensors))


NORM = {"input_norm.weight": ("BF16", [24])}


def test_extra_norms_need_flag_and_tensor(folder: Make) -> None:
    both = read_head(folder(EAGLE3 | {"norm_before_fc": True}, layer(0, 8) | NORM))
    assert both.norms == ("norm_before_fc",)
    with pytest.raises(ConfigError, match=r"not set and the tensor input_norm\.weight is present"):
        read_head(folder(EAGLE3, layer(0, 8) | NORM))
    with pytest.raises(ConfigError, match=r"set and the tensor input_norm\.weight is absent"):
        read_head(folder(EAGLE3 | {"norm_before_fc": True}, layer(0, 8)))


def test_unknown_tensors_are_listed(folder: Make) -> None:
    head = read_head(folder(EAGLE3, layer(0, 8) | {"layers.0.mystery.weight": ("BF16", [4])}))
    assert any("layers.0.mystery" in w for w in head.warnings)


def test_medusa_heads_are_counted_in_the_weights(folder: Make) -> None:
    """The published configuration says 2 heads; the file holds 5."""
    tensors = {f"{head}.{part}.weight": ("F16", [4, 4]) for head in range(5) for part in ("0.linear", "1")}
    head = read_head(folder({"medusa_num_heads": 2, "medusa_num_layers": 1}, tensors))
    assert (head.heads, head.medusa_layers, head.draft_limit) == (5, 1, 5)
    assert any("says 2 heads, the weights hold 5" in w for w in head.warnings)
    alone = read_head(folder({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    assert alone.heads == 2
    assert any("understate" in w for w in alone.warnings)


def test_medusa_choices_need_not_list_their_prefixes() -> None:
    whole = medusa_tree([[0], [0, 0], [0, 0, 0]], 5)
    assert medusa_tree([[0, 0, 0]], 5) == whole == ((0,), (0, 0), (0, 0, 0))
    with pytest.raises(ConfigError, match="6 deep, there are 5 heads"):
        medusa_tree([[0] * 6], 5)


def test_zero_residual_layers_stay_zero(folder: Make) -> None:
    tensors = {f"{head}.0.weight": ("F16", [12, 4]) for head in range(3)}
    assert read_head(folder({"medusa_num_heads": 3, "medusa_num_layers": 0}, tensors)).medusa_layers == 0


@pytest.mark.parametrize(
    ("config", "method", "limit"),
    [
        ({"dflash_config": {"mask_token_id": 3}, "block_size": 16}, "dflash", 15),
        ({"dflash_config": {"projector_type": "dspark", "markov_rank": 8}, "block_size": 7}, "dspark", 7),
        ({"dflash_config": {"projector_type": "domino"}, "block_size": 8}, "domino", 7),
        ({"architectures": ["PEagleDraftModel"]}, "p_eagle", None),
        (
            {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"parallel_draft_step": 4}},
            "p_eagle",
            None,
        ),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3", None),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 5}, "eagle3", None),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "eagle3", None),
        ({"architectures": ["LlamaForCausalLM"], "hydra_num_heads": 4}, "hydra", 4),
        ({"architectures": ["LlamaForCausalLM"]}, None, None),
    ],
)
def test_methods_and_limits(
    folder: Make, config: dict[str, Any], method: str | None, limit: int | None
) -> None:
    head = read_head(
        folder({name: value for name, value in EAGLE3.items() if name != "architectures"} | config)
    )
    assert (head.method, head.draft_limit) == (method, limit)


def test_an_eagle_1_head_is_known_by_its_tensors(folder: Make) -> None:
    plain = EAGLE3 | {"architectures": ["LlamaForCausalLM"]}
    assert inspect_model(folder(plain)).as_json()["layers"] == 1
    found = inspect_model(folder(plain, layer(0, 4) | {"fc.weight": ("BF16", [4, 8])}))
    assert isinstance(found, HeadFacts)
    assert found.method == "eagle"


def test_nested_layouts(folder: Make) -> None:
    inner = {name: value for name, value in EAGLE3.items() if name != "architectures"}
    speculators = read_head(
        folder({"speculators_model_type": "eagle3", "draft_vocab_size": 5, "transformer_layer_config": inner})
    )
    assert (speculators.layout, speculators.hidden_size, speculators.draft_vocab_size) == (
        "speculators",
        4,
        5,
    )
    eagle = read_head(folder({"model_type": "eagle", "model": inner}))
    assert (eagle.method, eagle.hidden_size) == ("eagle", 4)


def test_an_unquantized_head_never_inherits_and_a_quantized_one_says_so(folder: Make) -> None:
    plain = read_head(folder(EAGLE3, layer(0, 8)))
    assert (plain.quantization.algorithm, plain.dtype) == (None, "bfloat16")
    raw = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": []}}
    assert (
        read_head(folder(EAGLE3 | {"quantization_config": raw}, layer(0, 8))).quantization.algorithm == "FP8"
    )
    assert read_head(folder(EAGLE3, layer(0, 8), hf_quant_config=raw)).quantization.algorithm == "FP8"


def test_a_whole_model_is_not_a_head(folder: Make) -> None:
    with pytest.raises(ConfigError, match="a model, not a draft head"):
        read_head(folder(EAGLE3 | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}))


def test_inspect_of_a_head_has_the_stable_fields(folder: Make) -> None:
    model = inspect_model(folder(EAGLE3 | {"architectures": ["LlamaForCausalLM"]})).as_json()
    for config in (EAGLE3, {"medusa_num_heads": 3, "medusa_num_layers": 1}):
        result = inspect_model(folder(config)).as_json()
        assert set(model) <= set(result)
        assert set(result["tile_draft_length"]) == set(model["tile_draft_length"])
        assert result["head"]["method"]


def test_damaged_heads_never_end_in_a_traceback(folder: Make, tmp_path: Path) -> None:
    rng = random.Random(11)
    rich = REDUCED | {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        "norm_before_fc": True,
        "bos_token_id": 1,
    }
    full = layer(0, 8) | GOOD_MAP | NORM
    values = [None, 0, -1, 2.5, "x", [], [1], {}, {"a": 1}, True]
    for _ in range(150):
        config = dict(rich)
        for key in rng.sample(sorted(rich), rng.randint(0, 3)):
            config[key] = rng.choice(values)
        tensors = {name: value for name, value in full.items() if rng.random() < 0.85}
        for name in rng.sample(sorted(tensors), min(2, len(tensors))):
            tensors[name] = ("I64", rng.choice([[], [1], [5], [2, 3, 4]]))
        try:
            read_head(folder(config, tensors)).as_json()
        except TrtspecError as error:
            assert isinstance(error, ConfigError)
