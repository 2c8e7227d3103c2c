"""Fields that are each fine and exclude each other are refused at the one to change (`@` marks it)."""

from __future__ import annotations

import pytest

from tests.config.conftest import MINIMAL, at, places

GPU = "engine: {backend: tensorrt_llm, device: h100-sxm}\n"


def config(target="model: a/b", speculation="method: ngram", rest=""):
    return f"name: x\ntarget: {{{target}}}\nspeculation: {{{speculation}}}\n{rest}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (config(rest="engine: {numerics: @fast}"), "lossless"),
        (config(rest="lossless: true\nengine: {numerics: @fast}"), "lossless"),
        (config(target="model: a/b, kv_cache: @fp8"), "no fp8 KV cache"),
        (config(target="model: package:p, revision: @abc"), "not on the hub"),
        (config(target="model: ./p, revision: @abc"), "not on the hub"),
        (config(target="model: a/b, trust_remote_code: @a/c"), "the model is a/b"),
        (config(target="model: a/b, quantize_lm_head: @true"), "without a quantization format"),
        (config(target="model: a/b, block_size: @64"), "without a quantization format"),
        (config(speculation="method: ngram, min_ngram: @9"), "min_ngram 9 is above max_ngram 8"),
        (config(speculation="method: ngram, max_ngram: 1, min_ngram: @2"), "min_ngram 2 is above max_ngram 1"),
        # A minimum of 48 with 5 drafted once meant that nothing was ever drafted, silently.
        (config(speculation="method: ngram, draft_length: 5, min_draft_length: @48"), "nothing is drafted"),
        (config(speculation="method: suffix, draft_length: 1, min_draft_length: @2"), "nothing is drafted"),
        (config(speculation="method: lookahead, draft_length: @9"), "propose at most 8"),
        (
            config(speculation="method: specinfer, draft_length: @1, drafts: [{model: a/b}, {model: a/c}]"),
            "no token for each of 2 drafts",
        ),
        (config(speculation="method: suffix, pool_prompts: @true"), "pool_tokens is 0"),
        (config(speculation="method: ngram, pool_tokens: @64"), "hardly holds one answer"),
        (config(speculation="method: ngram, pool_tokens: @65536", rest=GPU), "trtspec's own decode loop"),
        (
            config(speculation="method: ngram, draft_length_policy: @adaptive", rest=GPU),
            "does not adapt them to acceptance",
        ),
        (config(speculation="method: eagle3, draft: {model: ./d, revision: @abc}"), "not on the hub"),
        (
            config(speculation="method: specinfer, drafts: [{model: a/b}, {model: ./d, revision: @abc}]"),
            "not on the hub",
        ),
        (
            config(speculation="method: ngram, draft_length: @8", rest="engine: {max_seq_len: 8}\n"
                   "workload: {context: 4, output_length: 4}\nevaluation: {output_length: 4}"),
            "does not fit in max_seq_len 8",
        ),
        (config(rest="verification: {acceptance: @typical}"), "typical acceptance changes the output"),
        (config(rest="verification: {acceptance: @relaxed}\nlossless: true"), "relaxed acceptance changes"),
        (config(rest="verification: {epsilon: @0.1}"), "exact acceptance has no epsilon"),
        (
            config(rest="verification: {acceptance: typical, top_k: @4}\nlossless: false"),
            "typical acceptance has no top_k",
        ),
        (
            config(speculation="method: none", rest="verification: {acceptance: @typical}\nlossless: false"),
            "no drafts to judge",
        ),
        (
            config(rest=GPU + "verification: {acceptance: @relaxed}\nlossless: false"),
            "tensorrt_llm backend does not run",
        ),
        (config(rest="engine: {device: @l4}"), "runs on the CPU"),
        (config(rest="engine: {backend: @tensorrt}"), "needs an NVIDIA GPU"),
        (config(rest="engine: {tensor_parallel: @2}"), "runs on one device"),
        (config(rest="engine: {backend: tensorrt, device: l4, expert_parallel: @2}"), "one device"),
        (config(rest="engine: {backend: tensorrt, device: l4, threads: @2}"), "onnxruntime backend"),
        (config(rest="workload: {batch_sizes: @[1, 16]}"), "above max_batch_size 8"),
        (config(rest="engine: {max_seq_len: @1024}"), "exceed max_seq_len 1024"),
        (
            config(rest="engine: {max_seq_len: @200}\nworkload: {context: 8, output_length: 8}"),
            "leaves no room for a prompt",
        ),
        (config(rest="workload: {acceptance: @[0.5], measured: ./run}"), "also taken from a measured run"),
        (config(rest="serving: {grpc_port: @8000}"), "grpc_port and http_port are both 8000"),
        (config(rest="serving: {http_port: @8002}"), "metrics_port and http_port are both 8002"),
        (config(rest="serving: {openai_port: @8001}"), "openai_port and grpc_port are both 8001"),
        (config(rest="serving: {max_concurrency: @9}"), "above max_batch_size 8"),
        (config(rest="evaluation: {concurrency: @73}"), "more than the server takes"),
        (config(rest="evaluation: {rate_per_s: @2.5, concurrency: 4}"), "limits what is"),
    ],
)  # fmt: skip
def test_contradiction_is_refused_at_the_field_to_change(problems, text, words):
    before = text[: text.index("@")]
    (problem,) = problems(text.replace("@", ""))
    assert at(problem) == f"{before.count(chr(10)) + 1}:{len(before.splitlines()[-1]) + 1}"
    assert words in problem.message and problem.hint


@pytest.mark.parametrize(
    "text",
    [
        config(rest="lossless: false\nengine: {numerics: fast}"),
        config(rest="verification: {acceptance: typical, epsilon: 0.2, delta: 0.5}\nlossless: false"),
        config(rest="verification: {acceptance: relaxed, top_k: 3, delta: 0.5}\nlossless: false"),
        config(rest="verification: {acceptance: exact}"),
        config(target="model: a/b, kv_cache: fp8", rest=GPU),
        config(target="model: a/b, revision: abc, trust_remote_code: a/b"),
        config(target="model: a/b, quantization: int4_awq, block_size: 64, quantize_lm_head: true"),
        config(speculation="method: ngram, draft_length: 5, min_draft_length: 5"),
        config(speculation="method: lookahead, draft_length: 2"),
        config(rest="engine: {max_seq_len: 1280}"),
        config(rest="engine: {backend: tensorrt_llm, device: b200, tensor_parallel: 8}"),
        config(rest="serving: {http_port: 8001, grpc_port: 8000}"),
        config(rest="evaluation: {concurrency: 72}"),
        config(rest="evaluation: {rate_per_s: 2, time_limit_s: 60, concurrency: 1}"),
    ],
)
def test_just_inside_the_rule_is_fine(load, text):
    load(text)


def test_all_contradictions_are_found_beside_ordinary_faults(problems):
    found = problems(
        config(
            target="model: a/b, kv_cache: fp8, quantisation: fp8",
            speculation="method: ngram, min_ngram: 9",
            rest="serving: {grpc_port: 8000, instances: none}",
        )
    )
    assert places(found) == ["2:32", "2:37", "3:41", "4:22", "4:39"]


def test_contradiction_with_a_faulty_field_is_not_guessed_at(problems):
    found = problems(MINIMAL + "engine: {backend: tensorr, device: l4}\n")
    assert places(found) == ["4:19"], "whether l4 fits is unknown until the backend is right"
