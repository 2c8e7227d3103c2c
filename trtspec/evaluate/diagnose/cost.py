"""Causes of slow steps and slow requests: what drafting, verifying and prefill take against what acceptance gives."""

from __future__ import annotations

from math import gcd

from trtspec.evaluate.diagnose.acceptance import best_draft_length
from trtspec.evaluate.diagnose.finding import Case, Finding
from trtspec.evaluate.metrics import decode_speedup
from trtspec.evaluate.text import number, percent, ratio
from trtspec.plan.measured import RETRIEVAL


def drafter_too_slow(case: Case) -> Finding | None:
    """Drafting takes at least a fifth of a step, decoding gains less than a tenth, and with free drafts it would pay.

    The time of drafting is what a step takes beyond the target's own part: the measured plain step times the plan's
    ratio of a verify step to a plain one. Lookups, whose drafts cost next to nothing, are left out.
    """
    split = _split_ms(case)
    if split is None or case.decode_gain is None or case.run.speculative.method in RETRIEVAL:
        return None
    draft, verify, plain = split
    length = case.acceptance_length or 1.0
    if draft < 0.2 * (draft + verify) or case.decode_gain >= 1.1 or length <= verify / plain:
        return None
    return Finding(
        "drafter-too-slow",
        "The drafter is too slow for what is accepted of its drafts.",
        (
            f"a step takes {number(draft + verify)} ms: about {number(draft)} ms of drafting "
            f"({percent(draft / (draft + verify), 0)}) and {number(verify)} ms of verifying; "
            f"a plain step {number(plain)} ms",
            f"acceptance length {number(length)}; it takes {number((draft + verify) / plain)} to break even",
        ),
        "use a smaller or more heavily quantized drafter, a shorter draft, or a lookup method",
        cost=draft / verify,
    )


def verification_outweighs(case: Case) -> Finding | None:
    """Decoding is slower than without speculation, and even free drafts would not pay: verifying a draft takes more
    plain steps than the acceptance length. Past one request in flight that is a batch past the crossover.

    Without a plan drafting and verifying are not told apart, and the whole step is held against acceptance.
    """
    step, plain, length = (
        case.mean_step_ms("speculative"),
        case.mean_step_ms("baseline"),
        case.acceptance_length,
    )
    if case.decode_gain is None or case.decode_gain >= 1 or not step or not plain or not length:
        return None
    if not any(s.drafted for s in case.steps):
        return None
    split = _split_ms(case)
    verify = split[1] if split and case.run.speculative.method not in RETRIEVAL else step
    if length > verify / plain:
        return None
    batch = case.run.settings.concurrency
    evidence = [
        f"a step takes {number(verify / plain)} plain steps"
        + (" without its drafting" if verify < step else "")
        + f" and gives {number(length)} tokens",
        f"{number(step)} ms a step, {number(plain)} ms without speculation",
    ]
    advice = (
        "draft fewer tokens, or a drafter that is right more often; where neither helps, do not speculate"
    )
    best = best_draft_length(case)
    if best is not None and best[1] > 1:
        advice = f"by this run's own numbers draft length {best[0]} is {ratio(best[1])} as fast" + (
            ": do not speculate here" if best[0] == 0 else ""
        )
    if batch > 1:
        crossover = (case.run.plan or {}).get("crossover_batch")
        if crossover:
            evidence.append(f"the plan puts the crossover at batch {crossover}")
        evidence += [
            f"{other.name} at {other.settings.load}: {ratio(gain.value)} decoding"
            for other in case.others
            if other.settings.concurrency < batch
            and other.settings.rate_per_s is None
            and other.speculative.method == case.run.speculative.method
            and (gain := decode_speedup(other.of("speculative"), other.of("baseline")))
        ]
        return Finding(
            "batch-past-crossover",
            f"{batch} requests at once are past the crossover: verifying competes with the batch for compute.",
            tuple(evidence),
            f"{advice}; `draft_length_policy: scheduled` shortens drafts as the load rises",
            cost=1 / case.decode_gain - 1,
        )
    return Finding(
        "verification-outweighs-acceptance",
        "Verifying costs more than acceptance brings, even if drafts were free.",
        tuple(evidence),
        advice,
        cost=1 / case.decode_gain - 1,
    )


def planned_past_crossover(case: Case) -> Finding | None:
    """The run speculated at a concurrency at or past the plan's crossover and decoded slower, or no faster by 5 %,
    where `verification_outweighs` has no step times to show it with."""
    crossover = (case.run.plan or {}).get("crossover_batch")
    batch, gain = case.run.settings.concurrency, case.decode_gain
    if not crossover or batch < crossover or gain is None or gain >= 1.05 or verification_outweighs(case):
        return None
    return Finding(
        "batch-past-crossover",
        f"{batch} requests at once are past the crossover the plan gives.",
        (f"crossover at batch {crossover}; decoding {ratio(gain)} at concurrency {batch}",),
        "`draft_length_policy: scheduled` stops drafting there; otherwise serve fewer requests at once",
        cost=max(0.0, 1 / gain - 1),
    )


def prefill_dominates(case: Case) -> Finding | None:
    """Whole requests gain at least a tenth less than decoding does, and the time to the first token is at least 30 %
    of request time: speculation cannot shorten that part."""
    whole, decode = case.summary["request_speedup"], case.decode_gain
    requests = case.run.of("speculative")
    total = sum(r.total_s for r in requests)
    if not whole or decode is None or total <= 0 or decode <= 1:
        return None
    share = sum(r.ttft_s for r in requests) / total
    if whole["value"] > 0.9 * decode or share < 0.3:
        return None
    tokens = sum(len(r.token_ids) for r in requests) / len(requests)
    return Finding(
        "prefill-dominates",
        "Decoding is faster, but requests spend much of their time before the first token.",
        (
            f"decoding {ratio(decode)}, whole requests {ratio(whole['value'])}",
            f"{percent(share)} of request time passes before the first token; "
            f"{number(tokens, 0)} output tokens a request",
        ),
        "expected for short answers to long prompts or a queue; reuse prompt prefixes, or measure longer answers",
        cost=decode / whole["value"] - 1,
    )


def prefix_reuse_lost(case: Case) -> Finding | None:
    """The target's cache held at least 5 % fewer prompt tokens with speculation than without, on the same requests.

    A head that reads the target's states drafts from the state after a block's last token, which depends on the token
    after it: servers drop the last block that matches (see `reusable_prefix`).
    """
    plain = {
        (r.question_id, r.turn): r.cached_tokens
        for r in case.run.of("baseline")
        if r.cached_tokens is not None
    }
    told = [
        r
        for r in case.run.of("speculative")
        if r.cached_tokens is not None and (r.question_id, r.turn) in plain
    ]
    ours = [r.cached_tokens or 0 for r in told]
    theirs = [plain[r.question_id, r.turn] for r in told]
    if sum(ours) >= 0.95 * sum(theirs):
        return None
    block, prompt = gcd(*ours, *theirs), sum(r.prompt_tokens for r in told)
    evidence = [
        f"{percent(sum(ours) / prompt)} of prompt tokens came from the cache with speculation, "
        f"{percent(sum(theirs) / prompt)} without"
    ]
    short = sum(reusable_prefix(r.prompt_tokens, block, drops_block=True) == 0 for r in told)
    if short:
        evidence.append(
            f"{short} of {len(told)} prompts are shorter than two blocks of {block} tokens, too short to reuse any"
        )
    return Finding(
        "prefix-reuse-lost",
        "Less of the prompts comes from the cache with speculation than without.",
        tuple(evidence),
        "smaller cache blocks where the server has them; hybrid models' are thousands of tokens long",
    )


def reusable_prefix(prompt_tokens: int, block: int, *, drops_block: bool) -> int:
    """Tokens of a prompt sent again that a cache of whole blocks saves; its last token is always computed.

    drops_block: the last matching block is computed again too, as with EAGLE-like heads.
    """
    return max(0, (prompt_tokens - 1) // block - drops_block) * block


def _split_ms(case: Case) -> tuple[float, float, float] | None:
    """(drafting, verifying, plain step) in mean milliseconds of a step; None without a baseline or a plan's ratio."""
    step, plain = case.mean_step_ms("speculative"), case.mean_step_ms("baseline")
    verify_ms = (case.run.plan or {}).get("verify_step_ms") or ()
    steps = case.steps
    if not step or not plain or not steps:
        return None
    if case.run.settings.concurrency == 1 and verify_ms:
        relative = [verify_ms[min(s.drafted, len(verify_ms) - 1)] / verify_ms[0] for s in steps]
        factor = sum(relative) / len(relative)
    elif case.planned and case.planned.get("terms_ms") and case.planned.get("speedup"):
        # A plan's speed-up is acceptance length × plain step / step, which gives the plain step of this batch.
        planned_plain = case.planned["speedup"] * case.planned["step_ms"] / case.planned["acceptance_length"]
        terms = case.planned["terms_ms"]
        factor = (sum(terms.values()) - terms.get("draft", 0.0)) / planned_plain
    else:
        return None
    verify = min(step, plain * factor)
    return step - verify, verify, plain
