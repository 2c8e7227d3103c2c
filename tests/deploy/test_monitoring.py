"""Alerts, dashboards and autoscaling rules name metrics that exist: one that does not is silent for ever."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tests.deploy.conftest import DEPLOY
from tests.deploy.promql import read

RULES = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text("utf-8"))
DASHBOARD = json.loads((DEPLOY / "grafana/trtspec.json").read_text("utf-8"))
ADAPTER = yaml.safe_load((DEPLOY / "prometheus/adapter.yml").read_text("utf-8"))

ALL = [rule for group in RULES["groups"] for rule in group["rules"]]
ALERTS = {rule["alert"]: rule for rule in ALL if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in ALL if "record" in rule}
# What Prometheus and its service discovery add.
SCRAPED_LABELS = {"job", "instance", "namespace", "pod"}


def check(expression: str, exported: dict[str, set[str]], also: set[str] = frozenset()) -> None:
    metrics, labels = read(expression)
    assert metrics, expression
    assert metrics <= set(exported) | {"up"} | also, metrics - set(exported) - also
    known = SCRAPED_LABELS.union({"model"} if also else set(), *(exported.get(name, ()) for name in metrics))
    assert labels <= known, f"{labels - known} of {expression}"


def test_every_rule_asks_for_what_is_exported(exported):
    for rule in ALL:
        check(rule["expr"], exported, set(RECORDS))


def test_a_misspelt_metric_label_or_function_is_caught(exported):
    for wrong in (
        "rate(trtspec_accepted_token_total[5m]) > 0",
        'trtspec_requests_total{reason="refused"}',
        "sum by (modell) (trtspec_queued_requests)",
    ):
        with pytest.raises(AssertionError):
            check(wrong, exported)
    for wrong in (
        "rat(trtspec_queued_requests[5m])",
        "sum(trtspec_queued_requests",
        "rate trtspec_x",
        "a[5 m]",
    ):
        with pytest.raises(ValueError):
            read(wrong)


def test_the_faults_an_operator_must_hear_of_have_alerts():
    assert {
        "TrtspecAcceptanceCollapsed",
        "TrtspecDraftingDisabled",
        "TrtspecQueueGrowing",
        "TrtspecRequestsRefused",
        "TrtspecDown",
    } <= set(ALERTS)


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_waits_says_how_bad_it_is_and_what_to_do(name):
    alert = ALERTS[name]
    assert re.fullmatch(r"\d+[mh]", alert["for"])
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert set(alert["annotations"]) == {"summary", "description"}
    for text in alert["annotations"].values():
        shown = set(re.findall(r"\$labels\.(\w+)", text))
        aggregated = "model" if name != "TrtspecDown" else "instance"
        assert shown <= {aggregated}, "a label that the expression has summed away shows nothing"


def test_finish_reasons_in_alerts_are_the_servers_own():
    from typing import get_args

    from trtspec.values import FinishReason

    known = {*get_args(FinishReason), "error", "refused"}
    for rule in ALL:
        assert set(re.findall(r'finish_reason="(\w+)"', rule["expr"])) <= known


def test_every_panel_asks_for_what_is_exported(exported):
    for panel in DASHBOARD["panels"]:
        assert panel["targets"] and panel["title"] and panel["description"]
        for target in panel["targets"]:
            check(target["expr"], exported)
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            metrics, _ = read(target["expr"])
            summed = re.search(r"sum by \((\w+)\)", target["expr"])
            kept = {summed[1]} if summed else set().union(*(exported[name] for name in metrics))
            assert shown <= kept, target


def test_the_dashboard_can_be_imported():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert all(x < 24 for x, _ in cells)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r"\$\{?(?!__)([a-z]+)", text)) == variables == {"datasource", "model"}


def test_all_metrics_are_seen_somewhere(exported):
    """An exported family that no rule and no panel shows would be exported for nobody."""
    shown = {target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]}
    used = set().union(*(read(expression)[0] for expression in shown))
    families = {name for name in exported if not name.endswith(("_sum", "_count"))}
    assert families <= used


def test_the_autoscalers_metrics_are_made_of_exported_ones(exported):
    for rule in ADAPTER:
        check(re.sub(r'!=""', '="x"', rule["seriesQuery"]), exported)
        query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'pod="x"')
        check(query, exported)


def test_prometheus_scrapes_the_front():
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"][0]["targets"] == ["trtspec:9000"]
    assert job["job_name"] in ALERTS["TrtspecDown"]["expr"]
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
