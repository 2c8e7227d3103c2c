"""Figures and files of a side-by-side run: a JSON record of every answer, and a Markdown table."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from peers import Answer, Row

from trtspec.evaluate.bootstrap import Estimate, ratio_interval
from trtspec.evaluate.environment import read_environment

OURS = "trtspec exact + n-gram"


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured. command: that made it, folders named by their last part. answers[row][round][prompt]."""

    date: str
    command: str
    threads: int
    max_tokens: int
    rounds: int
    tries: int
    versions: dict[str, str]
    rows: Sequence[Row]
    prompt_ids: Sequence[str]
    categories: Sequence[str]
    answers: dict[str, list[list[Answer]]]

    def per_prompt(self, name: str, *, whole: bool = False) -> list[tuple[float, float]]:
        """(tokens, seconds) for each prompt: tokens after the first and their time, or with `whole` all tokens
        and the time since the prompt was sent. Of each prompt's rounds the one with the median speed counts.
        """
        pairs = []
        for answers in zip(*self.answers[name]):
            speeds = []
            for a in answers:
                tokens, seconds = (len(a.tokens), a.total_s) if whole else (len(a.tokens) - 1, a.decode_s)
                speeds.append((tokens / seconds, tokens, seconds))
            speeds.sort()
            _, tokens, seconds = speeds[(len(speeds) - 1) // 2]
            pairs.append((tokens, seconds))
        return pairs

    def speeds(self, name: str, *, whole: bool = False) -> list[float]:
        """Tokens per second of each round, over all prompts."""
        result = []
        for answers in self.answers[name]:
            tokens = sum(len(a.tokens) - (not whole) for a in answers)
            result.append(tokens / sum(a.total_s if whole else a.decode_s for a in answers))
        return result

    def speed(self, name: str, *, whole: bool = False) -> float:
        """Tokens per second over all prompts, each at its median round."""
        pairs = self.per_prompt(name, whole=whole)
        return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)

    def ratio(
        self, name: str, other: str, *, whole: bool = False, category: str | None = None
    ) -> Estimate | None:
        """Speed of one row over another's, with an interval that resamples prompts."""
        pairs = zip(self.categories, self.per_prompt(name, whole=whole), self.per_prompt(other, whole=whole))
        return ratio_interval([(*a, *b) for kind, a, b in pairs if category in (None, kind)])

    def acceptance_length(self, name: str) -> float | None:
        """Tokens for each target forward pass after the prompt, token-weighted, first round."""
        answers = self.answers[name][0]
        if any(a.passes is None for a in answers):
            return None
        return sum(len(a.tokens) - 1 for a in answers) / max(sum(a.passes for a in answers), 1)

    def equal(self, name: str, other: str) -> int:
        """Prompts on which every round of both rows gave the same tokens."""
        both = zip(zip(*self.answers[name]), zip(*self.answers[other]))
        return sum(len({a.tokens for a in (*ours, *theirs)}) == 1 for ours, theirs in both)


def write(run: Run, folder: Path) -> Path:
    """Write peers-<cpu>.json and .md into `folder`; gives the path of the table."""
    environment = read_environment()
    slug = re.sub(r"[^a-z0-9]+", "-", environment.processor.lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "date": run.date,
        "command": run.command,
        "processor": environment.processor,
        "cores": environment.cores,
        "python": environment.python,
        "versions": run.versions,
        "threads": run.threads,
        "max_tokens": run.max_tokens,
        "rounds": run.rounds,
        "tries": run.tries,
        "prompts": list(run.prompt_ids),
        "rows": {row.name: _row_record(run, row) for row in run.rows},
    }
    (folder / f"peers-{slug}.json").write_text(json.dumps(record, indent=1) + "\n")
    table = folder / f"peers-{slug}.md"
    table.write_text("\n".join(_markdown(run, environment.processor, environment.cores)) + "\n")
    return table


def _row_record(run: Run, row: Row) -> dict:
    return {
        "weights": row.weights,
        "options": dict(row.options),
        "plain": row.plain,
        "tokens_per_s": run.speed(row.name),
        "tokens_per_s_by_round": run.speeds(row.name),
        "end_to_end_tokens_per_s": run.speed(row.name, whole=True),
        "tokens_per_pass": run.acceptance_length(row.name),
        "equal_to_plain": run.equal(row.name, row.plain),
        "answers": [
            [
                {
                    "tokens": len(a.tokens),
                    "first_s": round(a.first_s, 4),
                    "total_s": round(a.total_s, 4),
                    "passes": a.passes,
                    "other_cores": round(a.other_cores, 2),
                    "load": round(a.load, 2),
                }
                for a in answers
            ]
            for answers in run.answers[row.name]
        ],
    }


def _markdown(run: Run, processor: str, cores: int) -> list[str]:
    names = [row.name for row in run.rows]
    disturbed = [a.other_cores for name in names for answers in run.answers[name] for a in answers]
    loads = [a.load for name in names for answers in run.answers[name] for a in answers]
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    lines = [
        f"# Peers on {processor}, {cores} cores",
        "",
        f"{run.date}; {versions}; {run.threads} threads, greedy, at most {run.max_tokens} new tokens, all "
        f"engines stop at the model's end of turn; {len(run.prompt_ids)} prompts, {run.rounds} rounds, median "
        f"round of each prompt. Made by `{run.command}`. Other processes kept {median(disturbed):.2f} cores busy at "
        f"the median answer, "
        f"{max(disturbed):.2f} at the worst; load average {min(loads):.1f} to {max(loads):.1f}.",
        "",
        "| engine | weights | decode tok/s | rounds | end to end tok/s | over its own plain | "
        "tokens per pass | equal to its own plain |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in run.rows:
        rounds = run.speeds(row.name)
        compared = row.speculates and row.plain in names
        length = run.acceptance_length(row.name)
        cells = [
            row.name,
            row.weights,
            f"{run.speed(row.name):.1f}",
            f"{min(rounds):.0f} to {max(rounds):.0f}",
            f"{run.speed(row.name, whole=True):.1f}",
            _interval(run.ratio(row.name, row.plain)) if compared else "",
            f"{length:.2f}" if row.speculates and length else "",
            f"{run.equal(row.name, row.plain)} of {len(run.prompt_ids)}" if compared else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if OURS in names:
        lines += _ours(run, names)
    return lines


def _ours(run: Run, names: Sequence[str]) -> list[str]:
    """The exact speculative row against every other one."""
    lines = [
        "",
        f"`{OURS}` against the others: speed over all prompts with a 95 % interval (bootstrap over prompts), "
        "and single prompts.",
        "",
        "| against | decode | end to end | prompts: median, quarter to three quarters |",
        "|---|---:|---:|---:|",
    ]
    for name in names:
        if name == OURS:
            continue
        decode, whole = run.ratio(OURS, name), run.ratio(OURS, name, whole=True)
        single = f"{decode.median:.2f} ({decode.p25:.2f} to {decode.p75:.2f})"
        lines.append(f"| {name} | {_interval(decode)} | {_interval(whole)} | {single} |")
    plain = [name for name in ("trtspec exact", "trtspec fast") if name in names]
    if plain:
        fastest = max(plain, key=run.speed)
        kinds = ", ".join(
            f"{kind} {run.ratio(OURS, fastest, category=kind).value:.2f}"
            for kind in dict.fromkeys(run.categories)
        )
        lines += ["", f"Against the fastest plain path of the same weights (`{fastest}`), by kind: {kinds}."]
    return lines


def _interval(estimate: Estimate) -> str:
    if estimate.low is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"
