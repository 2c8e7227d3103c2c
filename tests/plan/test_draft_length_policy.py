"""Which draft length policy a plan gives the running system, and what it hands over for it."""

from __future__ import annotations

import pytest

from trtspec.plan import make_plan
from trtspec.plan.acceptance import AcceptanceCurve
from trtspec.plan.measured import Measured
from trtspec.plan.step_table import StepSample, StepTable

# Rows of a large batch cost much more than those of a small one: the best draft shrinks with the batch.
STEPS = StepTable(
    tuple(
        StepSample(batch, rows, 100, 10 + 0.02 * (batch * rows) ** 1.5)
        for batch in (1, 8, 64)
        for rows in (1, 2, 4, 8)
    ),
    "t",
)


def plan_of(make_config, tiny, method: str, **speculation: object):
    measured = Measured("run", method, AcceptanceCurve((0.6,) * 7, "m", 7, "measured"), STEPS)
    config = make_config(
        speculation={"method": method, **speculation},
        engine={"max_batch_size": 64},
        workload={"batch_sizes": (1, 64), "context": 100},
    )
    return make_plan(config, tiny, measured=measured)


def test_auto_follows_a_schedule_that_varies_where_the_drafter_does_not_weigh_its_drafts(
    make_config, tiny
) -> None:
    plan = plan_of(make_config, tiny, "draft_model")
    assert plan.draft_length_policy == "schedule"
    assert plan.draft_length == plan.schedule.longest == plan.schedule.at(1) > 0 == plan.schedule.at(64)
    assert plan_of(make_config, tiny, "ngram").draft_length_policy == "fixed"


def test_a_configured_length_stays_fixed_unless_a_policy_is_named(make_config, tiny) -> None:
    assert plan_of(make_config, tiny, "draft_model", draft_length=2).draft_length_policy == "fixed"
    plan = plan_of(make_config, tiny, "draft_model", draft_length=2, draft_length_policy="schedule")
    assert (plan.draft_length_policy, plan.draft_length) == ("schedule", 2)
    assert plan.schedule.longest == 2


@pytest.mark.parametrize("policy", ["fixed", "schedule", "adaptive"])
def test_a_named_policy_is_the_plans_and_the_readers(make_config, tiny, policy: str) -> None:
    from trtspec.plan.explain import explain

    plan = plan_of(make_config, tiny, "ngram", draft_length_policy=policy)
    assert plan.as_json()["draft_length_policy"] == policy
    assert ("the running system" in explain(plan)) == (policy != "fixed")


def test_without_a_varying_schedule_nothing_varies(make_config, tiny) -> None:
    config = make_config(speculation={"method": "draft_model"}, workload={"acceptance": (0.9, 0.9)})
    plan = make_plan(config, tiny)
    assert len(plan.schedule.entries) == 1
    assert plan.draft_length_policy == "fixed"


def test_tensorrt_llm_gets_a_schedule_unless_the_length_is_to_stay(make_config, llama_8b) -> None:
    def plan(**speculation: object):
        gpu = {"backend": "tensorrt_llm", "device": "h100-sxm", "version": "1.3.0", "max_batch_size": 256}
        return make_plan(
            make_config(
                engine=gpu,
                speculation={"method": "eagle3", **speculation},
                workload={"batch_sizes": (1, 256), "acceptance": (0.7, 0.6, 0.5, 0.4)},
            ),
            llama_8b,
        )

    follows, stays = plan(), plan(draft_length_policy="fixed")
    assert follows.draft_length_policy == "schedule" and follows.runtime_schedule
    assert stays.draft_length_policy == "fixed" and stays.runtime_schedule is None


def test_drafting_times_hold_all_that_is_not_the_targets_rows(make_config, tiny) -> None:
    """A draft model's passes, one by one; lookahead's window, whose rows are neither the target's nor drafts."""
    passes = make_plan(make_config(speculation={"method": "draft_model"}), tiny)
    assert passes.draft_ms[0] == 0
    assert passes.draft_ms[3] - passes.draft_ms[2] == pytest.approx(passes.draft_ms[2] - passes.draft_ms[1])
    assert passes.draft_ms[2] > passes.draft_ms[1] > 0
    window = make_plan(
        make_config(speculation={"method": "lookahead", "window_size": 2, "ngram_size": 3}), tiny
    )
    ms = window.verify_step_ms
    assert window.draft_ms[2] >= ms[2 + window.drafter.probe_rows] - ms[2] > 0
