"""Brings step times, drafter cost and acceptance of a mechanism together: measured where measured, else modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trtspec.checkpoints.facts import ArchitectureFacts
from trtspec.checkpoints.heads import HeadFacts
from trtspec.errors import ConfigError
from trtspec.plan.acceptance import AcceptanceCurve
from trtspec.plan.deployment import Deployment
from trtspec.plan.drafter import Drafter
from trtspec.plan.drafting import drafter_for, several
from trtspec.plan.measured import RETRIEVAL, Measured
from trtspec.plan.priors import Prior, choose_prior, stand_in
from trtspec.plan.request import PlanRequest
from trtspec.plan.search import Workpoint
from trtspec.plan.step_time import MeasuredStepTimes, RooflineStepTimes, StepTimes
from trtspec.plan.trained import trained_acceptance
from trtspec.plan.tree import MAX_BRANCHES, MAX_NODES, RANK_TREES, TreeModel

Draft = ArchitectureFacts | HeadFacts


class Workpoints:
    """The `Workpoint` of every method and batch size. Measured parts go to the method that was measured, everything
    else is modelled; warnings are about the configured method only."""

    def __init__(
        self,
        request: PlanRequest,
        deployment: Deployment,
        draft: Draft | None,
        measured: Measured | None,
        warnings: list[str],
        others: Sequence[Draft] = (),
    ) -> None:
        self._request = request
        self._deployment = deployment
        self._draft = draft
        self._others = tuple(others)
        self._measured = measured
        self._warnings = warnings
        self._modelled = RooflineStepTimes(deployment)
        self._parts: dict[str, tuple[StepTimes, Drafter, AcceptanceCurve]] = {}

    def at(self, method: str, batch: int) -> Workpoint:
        """Step times, drafter and acceptance of `method`; raises ConfigError where no acceptance is known."""
        if method not in self._parts:
            self._parts[method] = (*self._costs(method), self._curve(method))
        times, drafter, curve = self._parts[method]
        tree = self._tree(method, drafter, curve)
        return Workpoint(self._deployment, times, drafter, curve, self._plain_s(batch), tree)

    def _costs(self, method: str) -> tuple[StepTimes, Drafter]:
        fits = self._draft if self._request.method == method else None
        formats = (self._request.draft_quantization, *self._request.other_draft_quantizations)
        drafts = [
            drafter_for(
                method,
                self._deployment,
                draft,
                quantization=quantization if self._request.method == method else None,
                quantize_lm_head=self._request.quantize_lm_head,
                kv_group=self._request.kv_group,
            )
            for draft, quantization in zip((fits, *self._others), formats, strict=False)
        ]
        drafter = drafts[0] if len(drafts) == 1 or method != self._request.method else several(drafts)
        if method == "lookahead":
            drafter = replace(drafter, probe_rows=self._request.probe_rows)
        measured = self._measured
        if measured is None or measured.steps is None:
            return self._modelled, drafter
        if not measured.includes_drafting:
            return MeasuredStepTimes(measured.steps), drafter
        if method in (measured.method, "none"):
            return MeasuredStepTimes(measured.steps), drafter.at_no_cost()
        # Steps of a run contain its drafter: a lookup's work is too small to matter, a model's is not.
        return (
            MeasuredStepTimes(measured.steps) if measured.method in RETRIEVAL else self._modelled
        ), drafter

    def _tree(self, method: str, drafter: Drafter, curve: AcceptanceCurve) -> TreeModel | None:
        """See `Workpoint.tree`. TensorRT-LLM drafts chains unless asked for a dynamic tree, which trtspec does not."""
        own = self._request.method == method
        chain = own and self._request.draft_shape == "chain"
        if (
            method not in RANK_TREES
            or chain
            or self._request.backend == "tensorrt_llm"
            or curve.kind == "measured"
        ):
            return None
        choices = self._request.choices if own else None
        if method == "eagle" and choices is None:
            from trtspec.drafters.growth import EAGLE_CHOICES

            choices = EAGLE_CHOICES
        # Under the attention kernel's mask a path costs its rows; the CPU engine copies the cache for each.
        most = MAX_BRANCHES if self._request.backend == "onnxruntime" else MAX_NODES
        return TreeModel(len(choices) if choices else most, drafter.depth, choices)

    def _plain_s(self, batch: int) -> float | None:
        """The plain step that was measured apart, for the batch size it was measured at."""
        table = self._measured.steps if self._measured else None
        if table is None or table.plain_ms is None or batch != table.samples[0].batch:
            return None
        return table.plain_ms / 1e3

    def _curve(self, method: str) -> AcceptanceCurve:
        request, measured = self._request, self._measured
        if method == "none":
            return AcceptanceCurve((), "plain decoding", 0)
        if request.acceptance is not None and request.method in (method, "auto"):
            return AcceptanceCurve(request.acceptance, "declared", len(request.acceptance), "declared")
        if measured is not None and measured.curve is not None and measured.method in (None, method):
            return measured.curve
        if trained := self._trained(method):
            return trained
        prior = self._prior(method)
        if prior is None and request.method == method and (other := stand_in(method)):
            prior = self._prior(other)
            self._warnings.append(
                f"{method}: no published acceptance; {other}'s stands in until a run is measured"
            )
        if prior is None:
            raise ConfigError(
                f"no acceptance is known for {method}: nothing is published, measured or declared",
                hint="declare workload.acceptance, or measure a run and name it in workload.measured",
            )
        if prior.drafts == "tree" and not prior.nodes and request.method == method:
            self._warnings.append(
                f"{method}: the published acceptance is of tree drafts at batch 1; a chain of the same depth "
                "accepts less"
            )
        return prior.curve()

    def _trained(self, method: str) -> AcceptanceCurve | None:
        """What the configured draft brings along."""
        if self._draft is None or self._request.method != method:
            return None
        found = trained_acceptance(self._draft.source, method)
        if found is None:
            return None
        curve, temperature = found
        if temperature != self._request.temperature:
            self._warnings.append(
                f"the draft's acceptance was measured on text of temperature {temperature:g}, the workload has "
                f"{self._request.temperature:g}: measure a run"
            )
        return curve

    def _prior(self, method: str) -> Prior | None:
        facts = self._deployment.facts
        return choose_prior(
            method,
            target=f"{facts.source} {facts.model_type}",
            temperature=self._request.temperature,
            batch=self._request.batch_sizes[0],
            device=self._deployment.device.kind,
        )
