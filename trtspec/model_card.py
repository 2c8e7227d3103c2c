"""The Markdown of a build: `MODEL_CARD.md` (what it is, measured) and `README.md` (how to run it).

Written from the build's own records; what was not measured is not mentioned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trtspec.store import Artifact

_EXACT = (
    "Numerics are exact: a row's logits are the same, bit for bit, whatever else shares its step, so greedy "
    "output with speculation equals greedy output without. Which kernel runs depends on the processor: every "
    "machine that opens the engine checks this first and refuses to serve otherwise, and `trtspec eval` "
    "compares both outputs of every request it sends."
)
_NOT_EXACT = (
    "Numerics are fast, not exact: a row's logits can depend in their last bits on what shares its step, so "
    "output with speculation can differ from output without. `trtspec eval` counts how often it does."
)
_LOSSY = (
    "**Acceptance is lossy by choice**: drafts are judged by the `{acceptance}` rule, so output with speculation is "
    "not the target's own. `trtspec eval` counts the requests that differ."
)
_CHECKS = {
    "graph_error": "largest logit difference with float32 activations, in standard deviations of the logits",
    "mean_kl_nats": "mean KL divergence of the next-token distribution as it runs, in nats",
    "top1_agreement": "share of positions with the same likeliest token as it runs",
}


def model_card(record: Mapping[str, Any], plan: Mapping[str, Any], artifacts: Mapping[str, Artifact]) -> str:
    """The card of a build. record: its manifest; artifacts: folder of the build → artifact."""
    sections = (
        [f"# {record['name']}", "", _what(record, plan), ""],
        _models(record),
        _quantization(_read(artifacts, "target", "quantization_report.json")),
        _speculation(plan),
        _engine(_read(artifacts, "engine", "engine.json")),
        _versions(record),
    )
    return "\n".join(line for section in sections for line in section).rstrip() + "\n"


def build_readme(record: Mapping[str, Any], artifacts: Mapping[str, Artifact]) -> str:
    """How to serve, call, measure and check a build folder."""
    lines = [
        f"# {record['name']}",
        "",
        f"Built by trtspec {record['trtspec_version']} from `config.yaml`; `MODEL_CARD.md` says what it is.",
        "",
        "| file | holds |",
        "| --- | --- |",
        "| `config.yaml` | the resolved config; `trtspec build config.yaml` gives this build again |",
        "| `plan.json` | what was decided and why |",
        "| `manifest.json` | sha256 of every file, versions, models and licences |",
    ]
    holds = {
        "target": "the target model as quantized, in Hugging Face's layout",
        "draft": "the draft model as quantized, in Hugging Face's layout",
        "graph": "the ONNX graph that the TensorRT plan is built from",
        "engine": "the compiled engine",
        "trtllm": "TensorRT-LLM's settings, each with its reason, and how to start it",
        "acceptance": "what quantizing the draft costs in acceptance",
        "repository": "the Triton model repository",
    }
    lines += [f"| `{folder}/` | {holds.get(folder.partition('-')[0], '')} |" for folder in artifacts]
    if "graph" in artifacts and "engine" not in artifacts:
        lines += [
            "",
            "The machine that wrote this had no TensorRT or no GPU. Copy this folder to one that has, and there:",
            "",
            "```",
            "trtspec build --resume .",
            "```",
        ]
    if "trtllm" in artifacts:
        if "target" not in artifacts:
            lines += ["", "The weights are not in it yet: `trtspec build` says which command adds them."]
        lines += ["", "`trtllm/README.md` has the commands that serve it."]
    elif "repository" in artifacts:
        lines += [
            "",
            "Run these in this folder:",
            "",
            "```",
            "trtspec serve .        # Triton Inference Server, on loopback unless the config says otherwise",
            "trtspec eval .         # acceptance, tokens per second against no speculation, losslessness",
            "```",
        ]
    return "\n".join(lines) + "\n"


def _what(record: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    target = record["models"].get("target", {}).get("reference", "the target")
    method = plan.get("method", "none")
    drafting = "without speculation" if method == "none" else f"with {method} speculation"
    built = f"`{target}` {drafting}, built by trtspec {record['trtspec_version']}."
    return f"{built} Content digest `{record['digest']}`."


def _models(record: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Models and licences",
        "",
        "| role | model | revision | licence |",
        "| --- | --- | --- | --- |",
    ]
    for role, model in record["models"].items():
        licence = model["licence"] or "**not stated by the model: check before sharing**"
        lines.append(
            f"| {role} | `{model['reference']}` | {model['revision'] or 'local files'} | {licence} |"
        )
    return [*lines, "", "The licence of a model covers what is built from it.", ""]


def _quantization(report: Mapping[str, Any]) -> list[str]:
    if not report:
        return []
    lines = ["## Quantization", "", f"Format: `{report['format']}`.", ""]
    if report.get("perplexity_before") is not None and report.get("perplexity_after") is not None:
        before, after = report["perplexity_before"], report["perplexity_after"]
        lines += [
            f"Perplexity on held-out text: {before:.3f} before, {after:.3f} after "
            f"({after / before - 1:+.2%}, over {report['heldout_tokens']} tokens).",
            "",
        ]
    return lines


def _speculation(plan: Mapping[str, Any]) -> list[str]:
    if plan.get("method", "none") == "none":
        return []
    lines = ["## Speculation", "", f"Method `{plan['method']}`, draft length {plan['draft_length']}."]
    if binding := plan.get("binding"):
        lines.append(f"The term that decided the draft length: {binding}.")
    return [*lines, ""]


def _engine(info: Mapping[str, Any]) -> list[str]:
    if not info:
        return []
    spec, checks = info["spec"], info.get("checks", {})
    numerics = _EXACT if spec.get("exact") else _NOT_EXACT
    if verification := info.get("speculation", {}).get("verification"):
        numerics = _LOSSY.format(**verification)
    lines = [
        "## Engine and losslessness",
        "",
        f"Backend `{info['backend']}`, weights: {info['weights']}. "
        f"Up to {spec['max_batch']} sequences of {spec['max_seq_len']} tokens.",
        "",
        numerics,
        "",
    ]
    if checks:
        lines += ["Measured when it was built, against the PyTorch model with the same weights:", ""]
        lines += [f"- {_CHECKS.get(name, name)}: {value:.4g}" for name, value in sorted(checks.items())]
        lines.append("")
    return lines


def _versions(record: Mapping[str, Any]) -> list[str]:
    tools = {"python": record["python_version"], **record["tools"]}
    return [
        "## Built with",
        "",
        ", ".join(f"{name} {version}" for name, version in tools.items() if version) + ".",
        "",
    ]


def _read(artifacts: Mapping[str, Artifact], folder: str, name: str) -> dict[str, Any]:
    """A JSON file of one artifact, {} when the build stopped before it."""
    if folder not in artifacts or not (path := artifacts[folder].path / name).is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))
