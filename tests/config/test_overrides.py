"""`--set a.b=value`: the command line wins, and its faults stand at a column of its own text."""

from __future__ import annotations

import pytest

from tests.config.conftest import MINIMAL


@pytest.mark.parametrize(
    ("overrides", "section", "field", "value"),
    [
        (["engine.threads=2"], "engine", "threads", 2),
        (["engine.threads=2", "engine.threads=3"], "engine", "threads", 3),
        (["engine.threads="], "engine", "threads", None),
        (["workload.batch_sizes=[2, 4]"], "workload", "batch_sizes", (2, 4)),
        (["workload.batch_sizes[0]=4"], "workload", "batch_sizes", (4,)),
        (["workload.batch_sizes=[1,2,3]", "workload.batch_sizes[2]=8"], "workload", "batch_sizes", (1, 2, 8)),
        (["engine={threads: 2, max_batch_size: 4}"], "engine", "max_batch_size", 4),
        (["target.revision=null"], "target", "revision", None),
        (['engine.version="1.20"'], "engine", "version", "1.20"),
        (["target.model=org/a=b"], "target", "model", None),
    ],
)
def test_value_is_yaml_and_lands_on_its_field(load, problems, overrides, section, field, value):
    if overrides == ["target.model=org/a=b"]:
        (problem,) = problems(MINIMAL, *overrides)
        assert problem.where.endswith(":1:14"), "only the first equals sign separates"
        return
    assert getattr(getattr(load(MINIMAL, *overrides), section), field) == value


def test_changing_the_method_leaves_other_overrides_of_the_section_alone(load):
    text = MINIMAL.replace("ngram", "ngram, max_ngram: 5")
    overrides = ["speculation.draft_length=4", "speculation.method=suffix"]
    for order in (overrides, overrides[::-1]):
        speculation = load(text, *order).speculation
        assert (speculation.method, speculation.draft_length) == ("suffix", 4)


def test_item_of_a_draft_list_can_be_set(load):
    drafts = "{method: specinfer, drafts: [{model: a/c}, {model: a/d}]}"
    text = f"name: x\ntarget: {{model: a/b}}\nspeculation: {drafts}\n"
    drafts = load(text, "speculation.drafts[1].quantization=fp8").speculation.drafts
    assert [(draft.model, draft.quantization) for draft in drafts] == [("a/c", "none"), ("a/d", "fp8")]


def test_paths_are_relative_to_the_working_directory(load, tmp_path, monkeypatch):
    (tmp_path / "cwd" / "smol").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    assert load(MINIMAL, "target.model=smol").target.model == str(tmp_path / "cwd" / "smol")


@pytest.mark.parametrize(
    ("override", "column", "words"),
    [
        ("workload.context=abc", 18, "must be a whole number"),
        ("workload.contxt=4", 10, "unknown key 'contxt'"),
        ("wrkload.context=4", 1, "unknown key 'wrkload'"),
        ("workload.batch_sizes[0]=x", 25, "workload.batch_sizes[0] must be"),
        ("workload.batch_sizes[1]=4", 22, "has 1 items"),
        ("workload.context[0]=4", 18, "is not a list"),
        ("workload.batch_sizes=[1, x]", 26, "workload.batch_sizes[1] must be"),
        ("engine={thread: 2}", 9, "unknown key 'thread'"),
        ("name=[1", 6, "not valid YAML"),
        ("name=a: b: c", 10, "not valid YAML"),
        ("name=!!python/name:os.system", 6, "is not allowed"),
        ("name=X", 6, "characters it may not have"),
        ("name.deep=3", 6, "must be text"),
        ("name", 5, "path=value"),
        ("", 1, "path=value"),
        ("=3", 1, "path=value"),
        ("a..b=3", 2, "path=value"),
        (".a=3", 1, "path=value"),
        ("[0]=3", 4, "path=value"),
        ("a b=3", 2, "path=value"),
        ("a[x]=3", 2, "path=value"),
        ("a[0=3", 2, "path=value"),
        (".".join("a" * 40) + "=3", 80, "that deep"),
        ("extends=base.yaml", 8, "belongs in a file"),
        ("engine.threads=99999999999999999999999", 16, "more than 64 bits"),
        ("name=a\x00b", 7, "control character"),
    ],
)
def test_fault_of_an_override_stands_in_its_text(problems, override, column, words):
    (problem,) = problems(MINIMAL, override)
    assert problem.where.startswith("--set ")
    assert problem.where.rsplit(":", 2)[1:] == ["1", str(column)]
    assert words in problem.message


def test_faults_of_file_and_overrides_come_together(problems):
    found = problems(MINIMAL + "engine: {threads: 0}\n", "workload.context=0", "serving.http_port=x")
    assert len(found) == 3


def test_missing_field_is_the_files_fault_not_the_overrides(problems):
    (problem,) = problems(
        "name: x\ntarget: {kv_cache: auto}\nspeculation: {method: none}\n", "target.quantization=fp8"
    )
    assert problem.where.endswith("config.yaml:2:1")


def test_override_on_a_file_that_cannot_be_parsed_is_checked_as_well(problems):
    found = problems("name: [1\n", "engine.threads=0")
    assert found[0].where.endswith("config.yaml:1:7")
    assert found[1].where == "--set engine.threads=0:1:16"


def test_newlines_in_an_override_keep_the_place_on_one_line(problems):
    (problem,) = problems(MINIMAL, "name=\n\n - x")
    assert "\n" not in problem.where
