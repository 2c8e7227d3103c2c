"""Prompts arrive whole and unaltered, and what cannot be read is refused with its place."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from trtspec.errors import ConfigError, SetupError
from trtspec.evaluate.data import (
    CATEGORIES,
    PLACEHOLDER,
    Prompt,
    load_prompts,
    select_prompts,
    selection_identity,
)


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, object]]) -> Path:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def row(number: int, category: str = "coding", *turns: str) -> dict[str, object]:
    """A row in the SPEED-Bench schema."""
    return {
        "question_id": f"{number:032d}",
        "category": category,
        "sub_category": "sub",
        "turns": list(turns) or [f"question {number}"],
        "source": "somewhere",
        "src_id": str(number),
        "difficulty": "easy",
        "multiturn": len(turns) > 1,
    }


def test_the_shipped_prompts_have_the_schema_of_speed_bench() -> None:
    found = load_prompts("builtin")
    assert Counter(p.category for p in found.prompts) == dict.fromkeys(CATEGORIES, 8)
    assert {len(p.question_id) for p in found.prompts} == {32}
    assert all(p.source == "trtspec" and p.src_id and p.difficulty for p in found.prompts)
    assert 25 <= sum(p.multiturn for p in found.prompts) <= 33
    assert len({p.turns for p in found.prompts}) == 88
    for prompt in found.prompts:
        if prompt.category in ("rag", "summarization"):
            assert 200 <= len(prompt.turns[0].split()) <= 400, prompt.src_id
    assert load_prompts("speed-bench-mini") == found


def test_parquet_and_both_jsonl_shapes_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [row(1), row(2, "math", "first", "second")]
    messages = [
        {k: v for k, v in r.items() if k != "turns"}
        | {"messages": [{"role": "user", "content": turn} for turn in r["turns"]]}
        for r in rows
    ]
    expected = load_prompts(str(write_jsonl(tmp_path / "turns.jsonl", *rows))).prompts
    assert expected[1].turns == ("first", "second") and expected[1].multiturn
    assert expected[0].difficulty == "easy" and expected[0].src_id == "1"
    assert load_prompts(str(write_jsonl(tmp_path / "messages.jsonl", *messages))).prompts == expected
    assert load_prompts(str(write_parquet(tmp_path / "test.parquet", rows))).prompts == expected


def test_a_folder_is_searched_to_its_leaves(tmp_path: Path) -> None:
    write_parquet(tmp_path / "speed" / "qualitative" / "test.parquet", [row(1)])
    write_parquet(tmp_path / "speed" / "throughput_1k" / "test.parquet", [row(2)])
    (tmp_path / "speed" / "README.md").write_text("not data")
    found = load_prompts("speed", base=tmp_path)
    assert [p.src_id for p in found.prompts] == ["1", "2"]
    assert [f.name for f in found.files] == ["qualitative/test.parquet", "throughput_1k/test.parquet"]


def test_spec_bench_is_read_whole(spec_bench: Path) -> None:
    found = load_prompts(str(spec_bench))
    assert len(found.prompts) == 480
    assert found.prompts[0].question_id == "81" and len(found.prompts[0].turns) == 2


def test_assistant_turns_are_dropped_and_a_system_message_is_kept(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "somebody else's answer"},
        {"role": "user", "content": "two"},
    ]
    (prompt,) = load_prompts(str(write_jsonl(tmp_path / "chat.jsonl", {"messages": messages}))).prompts
    assert (prompt.system, prompt.turns, prompt.question_id) == ("Be brief.", ("one", "two"), "chat-1")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_placeholder_rows_are_refused_with_place_and_remedy(tmp_path: Path, kind: str) -> None:
    rows = [row(1), row(2, "rag", f"{PLACEHOLDER}: source HLE"), row(3)]
    path = tmp_path / f"test.{kind}"
    write_jsonl(path, *rows) if kind == "jsonl" else write_parquet(path, rows)
    with pytest.raises(SetupError) as refused:
        load_prompts(str(path))
    assert refused.value.where == f"{path}:2"
    assert "1 of 3 rows" in refused.value.message
    assert "prepare_data.py --dataset speed" in refused.value.hint


def test_a_placeholder_in_a_later_turn_is_seen(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="placeholder"):
        load_prompts(str(write_jsonl(tmp_path / "a.jsonl", row(1, "rag", "fine", f"{PLACEHOLDER} x"))))


def test_every_malformed_row_is_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    lines = [
        json.dumps(row(1)),
        "{not json",
        "[1, 2]",
        json.dumps({"question_id": "a"}),
        json.dumps({"turns": []}),
        json.dumps({"turns": ["fine", "  "]}),
        json.dumps({"turns": ["x"], "prompt": "y"}),
        json.dumps({"messages": [{"role": "tool", "content": "x"}]}),
        json.dumps({"prompt": 7}),
        json.dumps(row(1)),
    ]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ConfigError) as refused:
        load_prompts(str(path))
    assert [p.where for p in refused.value.problems] == [f"{path}:{line}" for line in range(2, 11)]
    assert "already used" in refused.value.problems[-1].message


def test_data_that_is_not_there_or_not_readable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("x")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "folder").mkdir()
    for name in ("missing.jsonl", "data.txt", "broken.parquet", "empty.jsonl", "folder", "./a/b"):
        with pytest.raises(ConfigError):
            load_prompts(name, base=tmp_path)


def test_a_hub_data_set_is_fetched_only_where_named_and_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot(name: str, **options: object) -> str:
        asked.append((name, options))
        write_parquet(tmp_path / "0a1b2c" / "qualitative" / "test.parquet", [row(1)])
        return str(tmp_path / "0a1b2c")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    found = load_prompts("org/Some-Bench/qualitative@0a1b2c", base=tmp_path)
    assert (found.revision, len(found.prompts)) == ("0a1b2c", 1)
    ((name, options),) = asked
    assert name == "org/Some-Bench" and options["repo_type"] == "dataset" and options["revision"] == "0a1b2c"
    assert options["allow_patterns"] == ["qualitative/*.parquet", "qualitative/*.jsonl"]


def test_a_hub_that_does_not_answer_is_a_setup_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, **options: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(SetupError, match="no route"):
        load_prompts("org/Some-Bench", base=tmp_path)


def test_selection_deals_from_every_category_in_turn() -> None:
    prompts = [Prompt(f"{c}{i}", c, ("x",)) for c in ("a", "b", "c") for i in range(3 if c != "b" else 1)]
    names = [p.question_id for p in select_prompts(prompts, count=6)]
    assert names == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert [p.question_id for p in select_prompts(prompts, count=4)] == names[:4]
    assert select_prompts(prompts, categories=["c"]) == tuple(prompts[4:])
    assert len(select_prompts(prompts, count=100)) == 7
    assert select_prompts(prompts) == tuple(prompts)


def test_an_unknown_category_is_answered_with_the_nearest() -> None:
    prompts = load_prompts("builtin").prompts
    with pytest.raises(ConfigError) as refused:
        select_prompts(prompts, categories=["codding", "zzz"])
    near, far = refused.value.problems
    assert near.hint == "did you mean coding?"
    assert "summarization" in far.hint
    with pytest.raises(ConfigError):
        select_prompts(prompts, count=0)


def test_the_identity_of_a_selection_sees_text_and_order() -> None:
    one, two = Prompt("1", "a", ("x",)), Prompt("2", "a", ("y",))
    assert selection_identity([one, two]) != selection_identity([two, one])
    assert selection_identity([one]) != selection_identity([Prompt("1", "a", ("z",))])
