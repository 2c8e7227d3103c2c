"""Builds for TensorRT: what is refused before anything is fetched, and what is left to a machine with a GPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.compile.test_tensorrt_plan import Recorder, recorder  # noqa: F401 (a fixture)
from tests.fake_stages import make_job
from tests.test_rest_build import write
from tests.test_resume import CONFIG
from tests.tiny_heads import tiny_head
from tests.tiny_models import with_tokenizer
from tests.tiny_parallel_heads import dflash_head, medusa_head
from trtspec import pipeline
from trtspec.checkpoints.head_layouts import dflash, eagle, medusa
from trtspec.cli import main
from trtspec.compile.tensorrt import lacking
from trtspec.config import load_config
from trtspec.drafters.catalog import TOKEN_HEADS
from trtspec.drafters.head_engine import read_info, write_info
from trtspec.engines.tensorrt_info import TensorRtInfo
from trtspec.errors import ConfigError, PlanInfeasible, SetupError
from trtspec.events import Emit
from trtspec.manifest import damaged_files, read_manifest
from trtspec.stages import check_buildable, stages_for


@pytest.fixture
def without_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, with a cache of its own."""
    if lacking() is None:
        pytest.skip("this machine has TensorRT and a GPU")
    monkeypatch.setenv("TRTSPEC_CACHE", str(tmp_path / "cache"))


HEAD = """
name: fake
target: {{model: a/b}}
speculation: {{method: eagle3, draft_length: 7, {options}}}
engine: {{backend: tensorrt, device: h200-sxm, numerics: {numerics}}}
lossless: {lossless}
"""


@pytest.mark.parametrize(
    ("options", "numerics", "words"),
    [
        ("draft: {model: c/d}", "exact", "to rounding only"),
        ("draft: {model: c/d, quantization: int8_weight_only}, shape: chain", "exact", "16 bits"),
        ("draft: {model: c/d}", "fast", None),
        ("draft: {model: c/d}, shape: chain", "exact", None),
    ],
)
def test_what_of_a_head_tensorrt_does_not_build_is_refused(
    options: str, numerics: str, words: str | None, tmp_path: Path
) -> None:
    path, lossless = tmp_path / "config.yaml", str(numerics == "exact").lower()
    path.write_text(HEAD.format(options=options, numerics=numerics, lossless=lossless))
    if words is None:
        check_buildable(load_config(path), "eagle3")
        return
    with pytest.raises(PlanInfeasible, match=words):
        check_buildable(load_config(path), "eagle3")


def test_only_the_plan_is_left_to_another_machine() -> None:
    stages = stages_for("ngram", "package", "tensorrt")
    assert [stage.name for stage in stages] == ["quantize", "export", "compile", "package"]
    assert [stage.name for stage in stages if stage.lacking] == ["compile"]
    assert not any(stage.lacking for stage in stages_for("ngram", "package", "onnxruntime"))


def test_candidates_are_counted_where_the_plan_is_built() -> None:
    """Nothing that was built before an engine could run knows how often they are right."""
    for method in TOKEN_HEADS:
        build, plain = (stages_for(m, "compile", "tensorrt")[-1] for m in (method, "eagle3"))
        assert [data.name for data in build.data(make_job())] == ["trtspec/quantize/data/heldout.jsonl"]
        assert set(build.code) > set(plain.code) and not plain.data(make_job())


HEADED = """
name: heads
target: {{model: {model}}}
speculation: {{method: medusa, draft_length: 2, draft: {{model: {head}}}{options}}}
engine: {{backend: tensorrt, device: h200-sxm, max_seq_len: 128, numerics: {numerics}}}
lossless: {lossless}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""


@pytest.mark.usefixtures("without_gpu")
def test_hits_are_counted_by_the_machine_that_has_a_gpu(
    tiny_model: Callable[[str], Path],
    recorder: Recorder,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The counting itself, on engines that run: tests/drafters/test_token_heads_on_tensorrt.py."""
    (tmp_path / "model").mkdir()
    model = with_tokenizer(tiny_model("llama-head-64"), tmp_path / "model")
    medusa.write_head(medusa_head(heads=3), tmp_path / "head")
    config, out = tmp_path / "config.yaml", tmp_path / "out"
    head = {"model": model, "head": tmp_path / "head", "numerics": "fast", "lossless": "false"}
    config.write_text(HEADED.format(**head, options=", choices: [[0, 0, 0, 0]]"))
    with pytest.raises(ConfigError, match="4 deep, there are 3 heads"):
        pipeline.build(load_config(config), out)
    config.write_text(HEADED.format(**head, options=""))
    assert main(["build", str(config), "--out", str(out), "--json"]) == SetupError.exit_code
    assert "hits" not in read_info(out / "graph", "medusa")
    counted: list[tuple[str, int]] = []

    def count(method: str, engine: Path, prompts: list[list[int]], emit: Emit) -> None:
        assert (engine / "head" / "medusa" / "model.plan").is_file() and min(map(len, prompts)) > 3
        counted.append((method, len(prompts)))
        write_info(engine, {**read_info(engine, method), "hits": [[0.5], [0.25]]})

    monkeypatch.setattr("trtspec.compile.heads.measure.measure_head", count)
    monkeypatch.setattr("trtspec.compile.tensorrt.lacking", lambda: None)
    monkeypatch.setattr("trtspec.stage.tool_version", lambda tool: "1")
    pipeline.resume(out)
    assert len(counted) == 1 and counted[0][0] == "medusa" and counted[0][1] > 8
    assert "hits" not in read_info(out / "graph", "medusa"), "the two folders share files"
    assert read_info(out / "engine", "medusa")["hits"] == [[0.5], [0.25]]
    record = read_manifest(out)
    assert not damaged_files(out, record)
    assert [data["name"] for data in record["data"]] == ["trtspec/quantize/data/heldout.jsonl"]


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ("target: {model: a/b, quantization: int4_awq}", "no Q/DQ for int4_awq"),
    ],
)
def test_what_tensorrt_has_no_layers_for_is_refused_before_anything_is_fetched(
    section: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("target: {model: a/b, quantization: fp8}", section))
    with pytest.raises(PlanInfeasible, match=words):
        check_buildable(load_config(path), "ngram")


@pytest.mark.parametrize(("quantization", "builds"), [("fp8", True), ("int8_weight_only", False)])
def test_a_draft_model_has_the_formats_of_a_target(quantization: str, builds: bool, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    draft = f"draft_model, draft: {{model: c/d, quantization: {quantization}}}"
    path.write_text(CONFIG.replace("ngram", draft))
    if builds:
        check_buildable(load_config(path), "draft_model")
        return
    with pytest.raises(PlanInfeasible, match="no Q/DQ for int8_weight_only") as caught:
        check_buildable(load_config(path), "draft_model")
    assert caught.value.where == "speculation.draft.quantization"


SELF = """
name: self
target: {{model: a/b, kv_cache: {kv_cache}}}
speculation: {{method: quantspec, draft_length: 7, kv_group_size: {group}, draft_quantization: {quantization}}}
engine: {{backend: tensorrt, device: h200-sxm}}
"""


@pytest.mark.parametrize(
    ("kv_cache", "group", "quantization", "where"),
    [
        ("auto", 128, "nvfp4", None),
        ("auto", 64, "nvfp4", "speculation.kv_group_size"),
        ("auto", 128, "int4_weight_only", "speculation.draft_quantization"),
        ("fp8", 128, "nvfp4", "target.kv_cache"),
    ],
)
def test_a_self_draft_has_the_cache_that_the_kernel_reads(
    kv_cache: str, group: int, quantization: str, where: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(SELF.format(kv_cache=kv_cache, group=group, quantization=quantization))
    if where is None:
        check_buildable(load_config(path), "quantspec")
        return
    with pytest.raises(PlanInfeasible) as caught:
        check_buildable(load_config(path), "quantspec")
    assert caught.value.where == where


TRIO = """
name: trio
target: {{model: {target}}}
speculation: {{method: specinfer, draft_length: 7, drafts: [{{model: {draft}}}, {{model: {draft}{options}}}]}}
engine: {{backend: tensorrt, device: h200-sxm, max_seq_len: 128, numerics: {numerics}}}
lossless: {lossless}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""


@pytest.mark.parametrize(
    ("options", "numerics", "where", "words"),
    [
        (", quantization: fp8", "fast", None, None),
        (", quantization: int4_awq", "fast", "speculation.drafts[1].quantization", "no Q/DQ for int4_awq"),
        ("", "exact", "speculation.method", "to rounding only"),
    ],
)
def test_each_of_several_drafts_is_one_that_tensorrt_builds(
    options: str, numerics: str, where: str | None, words: str | None, tmp_path: Path
) -> None:
    path, lossless = tmp_path / "config.yaml", str(numerics == "exact").lower()
    path.write_text(
        TRIO.format(target="a/b", draft="c/d", options=options, numerics=numerics, lossless=lossless)
    )
    if words is None:
        check_buildable(load_config(path), "specinfer")
        return
    with pytest.raises(PlanInfeasible, match=words) as caught:
        check_buildable(load_config(path), "specinfer")
    assert caught.value.where == where


def test_several_drafts_are_exported_before_the_graph_that_they_are_parts_of() -> None:
    stages = stages_for("specinfer", "package", "tensorrt", drafts=2)
    assert [stage.name for stage in stages] == [
        "quantize", "quantize_draft_0", "export_draft_0", "quantize_draft_1", "export_draft_1", "export", "compile",
        "package",
    ]  # fmt: skip
    assert stages[5].needs == ("quantize", "export_draft_0", "export_draft_1")
    assert [stage.name for stage in stages if stage.lacking] == ["compile"]


def test_trees_are_refused_where_plain_decoding_must_be_equal_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    text = CONFIG.replace("ngram", "lookahead")
    path.write_text(text)
    with pytest.raises(PlanInfeasible, match="to rounding only") as caught:
        check_buildable(load_config(path), "lookahead")
    assert "numerics: fast" in caught.value.hint
    path.write_text(text.replace("h200-sxm}", "h200-sxm, numerics: fast}\nlossless: false"))
    check_buildable(load_config(path), "lookahead")


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("method", "numerics", "rows"),
    [
        ("ngram", "exact", [8]),
        ("eagle3", "exact", [8]),
        ("dspark", "exact", [8]),
        ("lookahead", "fast", [1, 16, 128]),  # 7 drafts, the last token, and 7 rows of the window
    ],
)
def test_a_build_without_a_gpu_ends_with_the_setup_code_and_a_whole_folder(
    method: str,
    numerics: str,
    rows: list[int],
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if method == "eagle3":
        eagle.write_head(tiny_head("eagle3", head_dim=64), tmp_path / "head")
    if method == "dspark":
        dflash.write_head(dflash_head("dspark", block_size=8, head_dim=64), tmp_path / "head")
    (tmp_path / "model").mkdir()
    model = with_tokenizer(tiny_model("llama-head-64"), tmp_path / "model")
    config, out = tmp_path / "config.yaml", tmp_path / "out"
    text = CONFIG.replace("a/b, quantization: fp8", str(model)).replace(
        "engine: {", f"engine: {{max_seq_len: 128, numerics: {numerics}, "
    )
    text += f"lossless: {str(numerics == 'exact').lower()}\n"
    draft = f"draft: {{model: {tmp_path / 'head'}}}"
    drafts = {"eagle3": f"eagle3, shape: chain, {draft}", "dspark": f"dspark, {draft}"}
    text = text.replace("ngram", drafts.get(method, method))
    config.write_text(text + "workload: {context: 32, output_length: 32}\nevaluation: {output_length: 32}\n")
    assert main(["build", str(config), "--out", str(out), "--json"]) == SetupError.exit_code == 3
    error = json.loads(capsys.readouterr().out)["error"]
    assert "trtspec build --resume out" in error["hint"]
    assert not damaged_files(out, read_manifest(out))
    assert {path.name for path in out.iterdir() if path.is_dir()} == {"target", "graph"}
    graph = {path.name for path in (out / "graph").iterdir()}
    assert {"model.onnx", "model.onnx.data", "engine.json", "tensorrt.json", "tokenizer.json"} <= graph
    parts = {path.parent.name for path in (out / "graph" / "head").rglob("model.onnx")}
    assert parts == {"eagle3": {"head"}, "dspark": {"context", "block"}}.get(method, set())
    shapes = TensorRtInfo.read(out / "graph")
    assert (shapes.built, shapes.arch, shapes.trees) == (None, "sm_90", method == "lookahead")
    assert [profile.rows for profile in shapes.profiles] == rows
    assert "trtspec build --resume ." in (out / "README.md").read_text()
    assert main(["build", "--resume", str(out), "--json"]) == SetupError.exit_code


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("method", "numerics", "stages", "plans"),
    [
        ("draft_model", "exact", {"quantize_draft", "export_draft"}, {".", "draft"}),
        (
            "specinfer",
            "fast",
            {"quantize_draft_0", "export_draft_0", "quantize_draft_1", "export_draft_1"},
            {".", "draft-0", "draft-1"},
        ),
        ("quantspec", "exact", {"quantize_draft", "export_draft"}, {".", "draft"}),
        ("rest", "fast", {"datastore"}, {"."}),
        ("rest", "exact", {"datastore"}, {"."}),
    ],
)
def test_a_gpu_machine_finishes_what_a_method_has_besides(
    method: str,
    numerics: str,
    stages: set[str],
    plans: set[str],
    tiny_model: Callable[[str], Path],
    recorder: Recorder,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the folder alone: neither the first machine's cache nor what its config names is there."""
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    model = with_tokenizer(tiny_model("llama-head-64"), tmp_path / "model")
    if method == "rest":
        write(model, tmp_path / "other" / "texts", [[3, 4, 5], [3, 4, 6]])
        shape = "chain" if numerics == "exact" else "tree"
        speculation = (
            f"{{method: rest, datastore: {tmp_path / 'other' / 'texts'}, draft_length: 7, shape: {shape}}}"
        )
    elif method == "quantspec":
        speculation = "{method: quantspec, draft_length: 7, kv_group_size: 128, draft_quantization: none}"
    else:
        draft = f"{{model: {with_tokenizer(tiny_model('llama-head-64'), tmp_path / 'other')}}}"
        named = f"draft: {draft}" if method == "draft_model" else f"drafts: [{draft}, {draft}]"
        speculation = f"{{method: {method}, {named}, draft_length: 7}}"
    config, out = tmp_path / "config.yaml", tmp_path / "out"
    config.write_text(
        f"""
name: two
target: {{model: {model}}}
speculation: {speculation}
engine: {{backend: tensorrt, device: h200-sxm, max_seq_len: 128, numerics: {numerics}}}
lossless: {str(numerics == "exact").lower()}
workload: {{context: 32, output_length: 32}}
evaluation: {{output_length: 32}}
"""
    )
    assert main(["build", str(config), "--out", str(out), "--json"]) == SetupError.exit_code
    before = read_manifest(out)
    for name in ("model", "other", "cache"):
        shutil.rmtree(tmp_path / name)

    monkeypatch.setattr("trtspec.compile.tensorrt.lacking", lambda: None)
    monkeypatch.setattr("trtspec.stage.tool_version", lambda tool: "1")
    pipeline.resume(out)
    record = read_manifest(out)
    assert not damaged_files(out, record)
    assert set(record["stages"]) == {"quantize", *stages, "export", "compile", "package"}
    assert record["stages"].items() >= before["stages"].items() and record["data"] == before["data"]
    engine = out / "engine"
    assert {path.parent.relative_to(engine).as_posix() for path in engine.rglob("model.plan")} == plans
    assert (engine / "datastore.safetensors").is_file() == (method == "rest")
    assert all(TensorRtInfo.read(engine / part).built.version == recorder.version for part in plans)
    trees = {part for part in plans if TensorRtInfo.read(engine / part).trees}
    assert trees == ({"."} if numerics == "fast" else set()), "a draft writes chains"
