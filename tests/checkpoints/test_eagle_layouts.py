"""EAGLE's and MTP's published layouts: what is written is read back bit for bit, and what contradicts is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_heads import REDUCED, tiny_head
from trtspec.checkpoints import heads
from trtspec.checkpoints.head_layouts import eagle, mtp
from trtspec.checkpoints.head_layouts.head import Head, read_tensors, write_folder
from trtspec.errors import ConfigError

LAYOUTS = ("eagle", "specforge", "speculators", "modelopt")


def same(one: Head, other: Head) -> None:
    assert one.method == other.method
    assert dict(one.config) == dict(other.config)
    assert one.captured_layers == other.captured_layers
    assert (one.d2t is None) == (other.d2t is None)
    assert one.d2t is None or np.array_equal(one.d2t, other.d2t)
    assert one.tensors.keys() == other.tensors.keys()
    for name, array in one.tensors.items():
        assert array.dtype == other.tensors[name].dtype, name
        assert np.array_equal(array, other.tensors[name]), name


VARIANTS = {
    "plain": {},
    "reduced vocabulary": {"d2t": REDUCED, "bfloat16": True},
    "shared output layer": {"own_lm_head": False},
    "own embedding, other width": {
        "hidden_size": 48,
        "target_hidden_size": 64,
        "own_embedding": True,
        "head_dim": 32,
    },
    "two layers with biases": {"num_hidden_layers": 2, "biases": True, "qk_norm": True},
    "norms": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "a norm for each layer": {"fc_norm": True, "captured": (0, 2)},
    "scaled positions": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_theta": 500000.0,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("method", ["eagle3", "p_eagle"])
def test_a_round_trip_is_exact(method: str, variant: str, layout: str, tmp_path: Path) -> None:
    head = tiny_head(method, **VARIANTS[variant])
    eagle.write_head(head, tmp_path / "once", layout)
    read = eagle.read_head(tmp_path / "once")
    same(head, read)
    eagle.write_head(read, tmp_path / "twice", layout)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("settings", [{}, {"own_lm_head": False, "bfloat16": True}, {"own_embedding": True}])
def test_a_first_generation_head_comes_back_too(layout: str, settings: dict, tmp_path: Path) -> None:
    head = tiny_head("eagle", **settings)
    eagle.write_head(head, tmp_path, layout)
    same(head, eagle.read_head(tmp_path))
    assert "layers.0.input_layernorm.weight" not in head


def test_every_layout_has_the_names_its_readers_expect(tmp_path: Path) -> None:
    head = tiny_head("eagle3", d2t=REDUCED)
    first = {
        "eagle": "midlayer.",
        "specforge": "midlayer.",
        "speculators": "layers.0.",
        "modelopt": "layers.0.",
    }
    for layout, prefix in first.items():
        eagle.write_head(head, tmp_path / layout, layout)
        names = set(read_tensors(tmp_path / layout))
        assert {f"{prefix}hidden_norm.weight", "fc.weight", "d2t"} <= names
        assert ("t2d" in names) == (layout != "modelopt")  # ModelOpt's exporter has none
        assert heads.read_head(tmp_path / layout).method == "eagle3"


def test_captured_layers_are_counted_as_the_configs_count_them(tmp_path: Path) -> None:
    """0-based layers (0, 14, 26) of 30 are blocks (1, 15, 27) done; the config's numbers mean the same tensors."""
    head = tiny_head("eagle3", captured=(0, 14, 26), num_target_layers=30)
    eagle.write_head(head, tmp_path, "specforge")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 15, 27]
    assert eagle.read_head(tmp_path, target_layers=30).captured_layers == (0, 14, 26)
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 14, 26]  # ModelOpt's 0-based default
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert eagle.read_head(tmp_path, target_layers=30).captured_layers == (1, 14, 26)


def test_layers_that_would_be_read_as_others_are_not_written(tmp_path: Path) -> None:
    head = tiny_head("eagle3", captured=(0, 13, 25), num_target_layers=30)
    with pytest.raises(ConfigError, match=r"\[1, 14, 26\] of 30 would be read as 0-based"):
        eagle.write_head(head, tmp_path)


def broken(head: Head, **changes: np.ndarray | None) -> Head:
    """A head with tensors replaced, or left out (None)."""
    names = {name.replace("__", "."): value for name, value in changes.items()}
    tensors = {**head.tensors, **{n: v for n, v in names.items() if v is not None}}
    return replace(head, tensors={n: v for n, v in tensors.items() if n not in names or names[n] is not None})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm__weight": None}, r"lacks norm\.weight"),
        ({"layers__0__hidden_norm__weight": None}, "lacks layers.0.hidden_norm"),
        ({"norm__weight": np.ones(32, np.float32)}, r"norm\.weight has shape \[32\], expected \[64\]"),
        ({"extra__weight": np.ones(4, np.float32)}, "does not know: extra.weight"),
        ({"norm__weight": np.full(64, np.nan, np.float32)}, "not finite"),
        ({"norm__weight": np.full(64, 0x7F80, np.uint16)}, "not finite"),
        ({"fc__weight": np.ones((64, 128), np.float32)}, r"fc\.weight has shape|target_hidden_size|divide"),
    ],
)
def test_wrong_tensors_are_refused(changes: dict, said: str, tmp_path: Path) -> None:
    eagle.write_head(broken(tiny_head("eagle3"), **changes), tmp_path)
    with pytest.raises(ConfigError, match=said):
        eagle.read_head(tmp_path)


@pytest.mark.parametrize("width", [False, True], ids=["one spread", "by input width"])
def test_a_head_that_was_never_trained_is_refused(width: bool, tmp_path: Path) -> None:
    head, rng = tiny_head("eagle3"), np.random.default_rng(0)
    fresh = {
        name: np.ones_like(array)
        if array.ndim == 1
        else rng.standard_normal(array.shape).astype(np.float32) * (array.shape[1] ** -0.5 if width else 0.02)
        for name, array in head.tensors.items()
    }
    eagle.write_head(replace(head, tensors=fresh), tmp_path)
    with pytest.raises(ConfigError, match="freshly initialised"):
        eagle.read_head(tmp_path)
    fresh["norm.weight"] = fresh["norm.weight"] * np.float32(1.01)
    eagle.write_head(replace(head, tensors=fresh), tmp_path)
    eagle.read_head(tmp_path)


def test_a_matrix_that_was_never_loaded_is_named(tmp_path: Path) -> None:
    zeros = np.zeros((64, 96), np.float32)
    eagle.write_head(broken(tiny_head("eagle3"), layers__0__mlp__down_proj__weight=zeros), tmp_path)
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp\.down_proj\.weight holds one value everywhere"):
        eagle.read_head(tmp_path)


def test_a_quantized_head_is_refused_by_name(tmp_path: Path) -> None:
    write_folder(tmp_path, {"hidden_size": 4}, {"fc.weight": np.ones((4, 8), np.float32)})
    text = (tmp_path / "model.safetensors").read_bytes().replace(b'"F32"', b'"U32"')
    (tmp_path / "model.safetensors").write_bytes(text)
    with pytest.raises(ConfigError, match="a quantized head is not read here"):
        read_tensors(tmp_path)


# -- MTP


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"d2t": REDUCED, "bfloat16": True}, {"own_lm_head": False}])
def test_mtp_modules_come_back_as_they_were(modules: int, settings: dict, tmp_path: Path) -> None:
    head = tiny_head("mtp", num_hidden_layers=modules, **settings)
    mtp.write_head(head, tmp_path)
    same(head, mtp.read_head(tmp_path))
    facts = heads.read_head(tmp_path)
    assert facts.method == "mtp"
    assert facts.decoder.layers == modules


def test_modules_are_numbered_behind_the_targets_layers_and_share_their_tables(tmp_path: Path) -> None:
    head = tiny_head("mtp", num_hidden_layers=2)
    mtp.write_head(head, tmp_path / "own")
    stored = read_tensors(tmp_path / "own")
    assert {"model.layers.3.eh_proj.weight", "model.layers.4.shared_head.norm.weight"} <= stored.keys()
    table = stored.pop("lm_head.weight")
    copies = {f"model.layers.{i}.shared_head.head.weight": table for i in (3, 4)}
    target = {"model.layers.0.mlp.up_proj.weight": np.ones((2, 2), np.float32)}
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    write_folder(tmp_path / "inside", config, stored | copies | target)
    same(head, mtp.read_head(tmp_path / "inside"))
    write_folder(
        tmp_path / "differ", config, stored | copies | {"model.layers.4.shared_head.head.weight": table + 1}
    )
    with pytest.raises(ConfigError, match="different copies of lm_head"):
        mtp.read_head(tmp_path / "differ")
