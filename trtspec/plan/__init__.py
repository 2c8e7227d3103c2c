"""From facts to a decided deployment: draft length and mechanism by predicted tokens per second.

facts ─▶ deployment ─▶ step_time (roofline, tiles | measured table) ┐
         drafting, acceptance (measured | trained | published)      ├▶ search ─▶ schedule ─▶ plan ─▶ explain
         memory, feasibility                                        ┘
"""

from trtspec.plan.planner import make_plan, plan_bare
from trtspec.plan.result import Plan

__all__ = ["Plan", "make_plan", "plan_bare"]
