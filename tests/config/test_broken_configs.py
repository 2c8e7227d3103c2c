"""Thousands of broken configs: each is refused as a config error with a place, and nothing else comes out.

Valid configs are damaged in every way people and programs damage them. A damage that happens to leave the
config valid must load (and dump and load again); how many do is counted, so that the test cannot pass by
generating harmless ones.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtspec.config import dump_config, load_config, starter_config
from trtspec.errors import ConfigError

CASES, SHARDS = 2560, 8
PLACE = re.compile(r"^.+:[1-9]\d*:[1-9]\d*$")

COMPACT = """\
name: compact
target: {model: org/m, quantization: int4_awq, block_size: 64, calibration: {samples: 8}}
speculation: {method: specinfer, drafts: [{model: org/d}, {model: org/e, quantization: fp8}]}
engine: {backend: tensorrt_llm, version: "1.2.1", device: h100-sxm, max_batch_size: 32}
workload: {batch_sizes: [1, 8, 32], acceptance: [0.8, 0.7], max_itl_ms: 50}
lossless: true
"""
BASES = [yaml.safe_load(text) for text in (starter_config(), COMPACT)]
REQUIRED = [("name",), ("target",), ("target", "model"), ("speculation",), ("speculation", "method")]

WRONG: list[Any] = [
    None, True, "yes", "", " ", "x y", -1, 0.5, 10**30, -(10**18), 1e308, float("nan"), float("inf"),
    [], {}, [[]], [None], {"a": {"b": []}}, "\x07", "é" * 9, "🦀", "8", "1e3", "1:30", "a" * 5000,
    "2024-01-01", "*", "&a", "!x",
]  # fmt: skip
SHRAPNEL = [
    *":{}[],&*#?|-<>=!%@`'\"\\\t \n~^\r\x00\x1b\u2028\ufeffé0",
    "- ", ": ", "<<: ", "---\n", " #", "\n\n", "  ",
]  # fmt: skip

Damage = Callable[[random.Random, dict[str, Any]], "tuple[bytes, list[str]]"]


def text_of(data: Any, rng: random.Random) -> str:
    return yaml.safe_dump(
        data, sort_keys=False, allow_unicode=True, default_flow_style=rng.choice([False, None])
    )


def plain(data: Any, rng: random.Random) -> tuple[bytes, list[str]]:
    return text_of(data, rng).encode("utf-8", "replace"), []


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        if isinstance(value, dict | list) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def inside(data: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        data = data[step]
    return data


def mapping_paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(data, dict):
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from mapping_paths(value, (*path, key))


def unknown_key(rng, data):
    where = inside(data, rng.choice(list(mapping_paths(data))))
    name = rng.choice([*where, "x", "max_len", "<<", "é", "0x"])
    cut = rng.randrange(len(name) + 1)
    where[rng.choice([name[:cut] + "z" + name[cut:], name.upper(), name.replace("_", "-") + "s"])] = (
        rng.choice(WRONG)
    )
    return plain(data, rng)


def wrong_type(rng, data):
    path = rng.choice(list(leaves(data)))
    inside(data, path[:-1])[path[-1]] = rng.choice(WRONG)
    return plain(data, rng)


def wrong_section(rng, data):
    data[rng.choice(list(data))] = rng.choice(WRONG)
    return plain(data, rng)


def missing_required(rng, data):
    path = rng.choice(REQUIRED)
    del inside(data, path[:-1])[path[-1]]
    return plain(data, rng)


def swapped_values(rng, data):
    one, two = rng.sample(list(leaves(data)), 2)
    first, second = inside(data, one[:-1]), inside(data, two[:-1])
    first[one[-1]], second[two[-1]] = second[two[-1]], first[one[-1]]
    return plain(data, rng)


def swapped_sections(rng, data):
    one, two = rng.sample([key for key, value in data.items() if isinstance(value, dict)], 2)
    data[one], data[two] = data[two], data[one]
    return plain(data, rng)


def bad_indentation(rng, data):
    lines = yaml.safe_dump(data, sort_keys=False).splitlines(keepends=True)
    number = rng.randrange(len(lines))
    lines[number] = rng.choice([" ", "   ", "\t", "     "]) + lines[number]
    return "".join(lines).encode(), []


def duplicated_line(rng, data):
    lines = yaml.safe_dump(data, sort_keys=False).splitlines(keepends=True)
    number = rng.randrange(len(lines))
    return "".join([*lines[: number + 1], *lines[number:]]).encode(), []


def random_bytes(rng, data):
    content = bytearray(plain(data, rng)[0])
    for _ in range(rng.randint(1, 6)):
        content[rng.randrange(len(content))] = rng.choice([rng.randrange(256), rng.randrange(32, 127)])
    return bytes(content), []


def shrapnel(rng, data):
    text = text_of(data, rng)
    for _ in range(rng.randint(1, 4)):
        cut = rng.randrange(len(text) + 1)
        text = text[:cut] + rng.choice(SHRAPNEL) + text[cut + rng.randint(0, 2) :]
    return text.encode("utf-8", "replace"), []


def truncated(rng, data):
    content = plain(data, rng)[0]
    return content[: rng.randrange(len(content))], []


def deep_nesting(rng, data):
    depth = rng.choice([33, 100, 400, 5000])
    shape = rng.choice(
        ["[" * depth + "]" * depth, "[" * depth, "{a: " * depth + "}" * depth, "- " * depth + "x"]
    )
    return (text_of(data, rng) + f"deep:\n  {shape}\n").encode(), []


def tags_and_anchors(rng, data):
    value = rng.choice(
        ["!!python/object/apply:os.system [x]", "!secret x", "!!binary aGk=", "!!set {a}", "!!int x",
         "!%ff x", "!!null 3", "*nowhere", "&a [*a]", "!<tag:x,2000:y> z",
         "!!timestamp 2024-01-01", "!!float [1]"]
    )  # fmt: skip
    key = rng.choice(["name", "extra", "lossless", "engine"])
    data.pop(key, None)
    return (yaml.safe_dump(data, sort_keys=False) + f"{key}: {value}\n").encode(), []


def documents(rng, data):
    text = text_of(data, rng)
    return rng.choice(
        [f"{text}---\n{text}", f"{text}...\n---\n", f"- {json.dumps(data)}", json.dumps([data])]
    ).encode(), []


def bad_extends(rng, data):
    data["extends"] = rng.choice(
        ["config.yaml", "absent.yaml", ".", "/dev/zero", "", 3, None, {}, [], [3], ["config.yaml"], [["a"]],
         ["broken.yaml"], "broken.yaml", "empty.yaml", "loop_a.yaml", ["fault.yaml", "absent.yaml"], "a\x00b",
         "x" * 5000]
    )  # fmt: skip
    return plain(data, rng)


def bad_override(rng, data):
    fields = [".".join(map(str, path)) for path in leaves(data)]
    value = rng.choice(
        [
            "",
            "[",
            "{a: b}",
            "!x y",
            "abc",
            "-1",
            "\x00",
            "[[[]]]",
            "1e999",
            "*a",
            "'",
            "\n- a",
            "no",
            "x: y: z",
        ]
    )
    name = rng.choice(
        [rng.choice(fields), "", "a..b", "engine", "engine.", "workload.batch_sizes[9]", "name[0]", "é",
         "[0]", ".".join("a" * 100), "x" * 3000, "extends", "speculation.drafts[0].model.x",
         "target.modl", "name.a.b"]
    )  # fmt: skip
    return plain(data, rng)[0], [rng.choice([f"{name}={value}", name, f"{name}=={value}"])]


DAMAGES: list[Damage] = [
    unknown_key, wrong_type, wrong_section, missing_required, swapped_values, swapped_sections,
    bad_indentation, duplicated_line, random_bytes, shrapnel, truncated, deep_nesting,
    tags_and_anchors, documents,
    bad_extends, bad_override,
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that `bad_extends` names."""
    (tmp_path / "broken.yaml").write_text("name: [1\n")
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "fault.yaml").write_text("engine: {threads: -1}\n")
    (tmp_path / "loop_a.yaml").write_text("extends: loop_b.yaml\n")
    (tmp_path / "loop_b.yaml").write_text("extends: loop_a.yaml\n")
    return tmp_path


def is_refused(path: Path, overrides: list[str]) -> bool:
    """Loads; checks everything a refusal, or a config that loads, has to fulfil."""
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        assert error.exit_code == 2
        assert error.problems
        for problem in error.problems:
            assert PLACE.match(problem.where), problem
            assert problem.message
        assert PLACE.match(error.where)
        str(error).encode("utf-8")
        json.dumps(error.as_json())
        return True
    resolved = path.with_name("resolved.yaml")
    resolved.write_text(dump_config(config), encoding="utf-8")
    assert load_config(resolved) == config
    return False


@pytest.mark.parametrize("shard", range(SHARDS))
def test_damaged_configs_are_refused_with_a_place_or_load(shard, folder):
    path = folder / "config.yaml"
    refused: Counter[str] = Counter()
    made: Counter[str] = Counter()
    for case in range(shard, CASES, SHARDS):
        rng = random.Random(case)
        damage = DAMAGES[(case // SHARDS) % len(DAMAGES)]
        content, overrides = damage(rng, copy.deepcopy(rng.choice(BASES)))
        path.write_bytes(content)
        try:
            refused[damage.__name__] += is_refused(path, overrides)
        except Exception as error:
            raise AssertionError(
                f"case {case} ({damage.__name__}), overrides {overrides}, {content!r}"
            ) from error
        made[damage.__name__] += 1
    assert sum(made.values()) == CASES // SHARDS
    assert sum(refused.values()) > 0.85 * sum(made.values()), "most damages must really break the config"
    for name in (
        "unknown_key",
        "missing_required",
        "deep_nesting",
        "tags_and_anchors",
        "documents",
        "bad_extends",
    ):
        assert refused[name] == made[name], f"{name} always breaks a config"


@pytest.mark.parametrize("base", range(len(BASES)))
def test_undamaged_configs_load(base, folder):
    path = folder / "config.yaml"
    path.write_bytes(plain(BASES[base], random.Random(0))[0])
    assert not is_refused(path, [])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))
    )
)
def test_noise_is_refused_with_a_place(folder, content):
    path = folder / "config.yaml"
    path.write_bytes(content)
    assert is_refused(path, [])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=60), min_size=1, max_size=3))
def test_noise_as_override_is_refused_with_a_place(folder, overrides):
    path = folder / "config.yaml"
    path.write_bytes(plain(BASES[0], random.Random(0))[0])
    assert is_refused(path, overrides)
