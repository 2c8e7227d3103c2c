"""The files that readers of specdec_bench take, recomputed here from its published definitions."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.evaluate.conftest import FakeTarget, request
from trtspec.errors import ConfigError
from trtspec.evaluate import specdec_bench
from trtspec.evaluate.data import Prompt, PromptSet
from trtspec.evaluate.record import RunRecord, RunSettings
from trtspec.evaluate.run import EvalRequest, evaluate
from trtspec.events import silent


@pytest.fixture
def record(prompts: tuple[Prompt, ...], tmp_path: Path) -> RunRecord:
    target = FakeTarget(accepted=(2, 0, 3), seconds_per_step=0.001)
    settings = RunSettings(output_length=9)
    asked = EvalRequest("x", target, FakeTarget(), PromptSet("d", prompts, ()), prompts, settings)
    return evaluate(asked, tmp_path, silent)


def published(record: RunRecord) -> tuple[dict, dict]:
    """acceptance and timing by specdec_bench's own procedure, from chunks of tokens and their time stamps."""
    lengths, times, tokens, category = {}, [], [], {}
    for r in record.of("speculative"):
        chunks = [1, *(s.emitted for s in r.steps)]
        lengths.setdefault(r.question_id, []).extend(chunks)
        category[r.question_id] = r.category
        times.append([r.start_s, *(r.start_s + t for t in (r.ttft_s, *(s.at_s for s in r.steps)))])
        tokens.append(sum(chunks))
    request_al = {q: sum(v) / len(v) for q, v in lengths.items()}
    flat = [n for v in lengths.values() for n in v]
    histogram = {n: flat.count(n) for n in sorted(set(flat))}
    conditional, joint, running, previous = {}, {}, len(flat), 1
    for n, occurrences in histogram.items():
        joint[n] = running / len(flat)
        conditional[n] = joint[n] / previous
        previous, running = joint[n], running - occurrences
    acceptance = {
        "Request_AL": request_al,
        "Category_AL": {
            c: np.mean([v for q, v in request_al.items() if category[q] == c]) for c in set(category.values())
        },
        "Average_AL": np.mean(list(request_al.values())),
        "Acceptance_Length_Histogram": {str(k): v for k, v in histogram.items()},
        "Conditional_Acceptance_Rate": {str(k): v for k, v in conditional.items()},
        "Joint_Acceptance_Rate": {str(k): v for k, v in joint.items()},
    }
    timing = {
        "Output TPS": sum(tokens) / (max(t[-1] for t in times) - min(t[0] for t in times)),
        "E2E Request Time": [t[-1] - t[0] for t in times],
        "TTFT Time": [t[1] - t[0] for t in times],
        "Request Generation Step Time": [b - a for t in times for a, b in itertools.pairwise(t)],
        "Request Generation Tokens Per Second": [(n - 1) / (t[-1] - t[1]) for n, t in zip(tokens, times)],
        "Number of Output Tokens": tokens,
    }
    return acceptance, timing


def test_acceptance_rate_json_is_what_its_definitions_give(record: RunRecord, tmp_path: Path) -> None:
    (written,) = json.loads((tmp_path / "acceptance_rate.json").read_text())
    expected, _ = published(record)
    assert list(written) == list(expected)
    for key, value in expected.items():
        assert written[key] == pytest.approx(value), key
    assert written["Average_AL"] == pytest.approx(9 / 4)  # the prefill chunk counts as a step
    assert written["Conditional_Acceptance_Rate"]["1"] == 1.0
    assert json.loads((tmp_path / "specbench_results.json").read_text()) == written


def test_timing_json_is_what_its_definitions_give(record: RunRecord, tmp_path: Path) -> None:
    (written,) = json.loads((tmp_path / "timing.json").read_text())
    _, expected = published(record)
    assert written["Output TPS"] == written["Output TPS/gpu"] == pytest.approx(expected.pop("Output TPS"))
    assert set(written) == {"Output TPS", "Output TPS/gpu", *expected}
    for key, values in expected.items():
        stats = written[key]
        assert set(stats) == {"min", "max", "mean", "std", "quantiles"}
        assert stats["mean"] == f"{np.mean(values):.4f}" and stats["std"] == f"{np.std(values):.4f}"
        assert stats["quantiles"] == {str(q): f"{np.quantile(values, q):.4f}" for q in (0.25, 0.5, 0.75)}


def test_a_length_that_never_occurs_is_skipped() -> None:
    # The published synthetic example: histogram {1: 2, 2: 3, 4: 5}.
    one = replace(request([(3, 0, 1)] * 1 + [(3, 1, 2)] * 3 + [(3, 3, 4)] * 5))
    found = specdec_bench.acceptance_object({"q": [one]})
    assert found["Acceptance_Length_Histogram"] == {1: 2, 2: 3, 4: 5}
    assert found["Conditional_Acceptance_Rate"] == pytest.approx({1: 1.0, 2: 0.8, 4: 0.625})
    assert found["Joint_Acceptance_Rate"] == pytest.approx({1: 1.0, 2: 0.8, 4: 0.5})
    assert found["Average_AL"] == pytest.approx(2.8)


def test_all_turns_of_a_question_are_one_request_there(record: RunRecord, tmp_path: Path) -> None:
    lines = [json.loads(x) for x in (tmp_path / "specbench_responses.jsonl").read_text().splitlines()]
    assert [x["question_id"] for x in lines] == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert lines[5]["turns"] == ["first part", "second part"]
    texts = [r.text for r in record.of("speculative") if r.question_id == "q5"]
    assert lines[5]["choices"] == [{"index": 0, "turns": texts}] and len(texts) == 2
    (written,) = json.loads((tmp_path / "acceptance_rate.json").read_text())
    assert set(written["Request_AL"]) == {"q0", "q1", "q2", "q3", "q4", "q5"}


def test_a_second_run_is_appended_and_the_configuration_replaced(record: RunRecord, tmp_path: Path) -> None:
    specdec_bench.write(replace(record, created_at="later"), (), tmp_path)
    assert len(json.loads((tmp_path / "acceptance_rate.json").read_text())) == 2
    assert len(json.loads((tmp_path / "timing.json").read_text())) == 2
    assert json.loads((tmp_path / "configuration.json").read_text())["timestamp"] == "later"


def test_a_file_that_is_no_list_is_not_overwritten(record: RunRecord, tmp_path: Path) -> None:
    for text in ("{}", "[1,"):
        (tmp_path / "timing.json").write_text(text)
        with pytest.raises(ConfigError):
            specdec_bench.write(record, (), tmp_path)
        assert (tmp_path / "timing.json").read_text() == text


def test_secrets_are_redacted_at_any_depth_and_tokenizers_are_not(
    record: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONTAINER_IMAGE", "image:1")
    written = specdec_bench.configuration(record)
    assert written["container_image"] == "image:1" and written["tokenizer"] == "fake"
    assert written["speculative_algorithm"] == "NGRAM" and written["draft_length"] == 3
    nested = specdec_bench._redact({"a": [{"api_key": "x", "HF_TOKEN": "y"}], "tokenizer_mode": "auto"})
    assert nested == {
        "a": [{"api_key": "***REDACTED***", "HF_TOKEN": "***REDACTED***"}],
        "tokenizer_mode": "auto",
    }


def test_requests_of_one_token_have_no_generation_statistics() -> None:
    assert "Request Generation Step Time" not in specdec_bench.timing_object([request([])], 1)
    assert specdec_bench.timing_object([request([(0, 0, 1)])], 2)["Output TPS/gpu"] == pytest.approx(
        2 / 0.12 / 2
    )
