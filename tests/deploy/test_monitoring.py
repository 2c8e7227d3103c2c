"""Alerts, dashboards and autoscaling rules name metrics that exist: one that does not is silent for ever."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.conftest import DEPLOY
from tests.deploy.promql import read

RULES = yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text("utf-8"))
DASHBOARDS = {path.stem: json.loads(path.read_text("utf-8")) for path in (DEPLOY / "grafana").glob("*.json")}
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
    for made, source in re.findall(r'"(\w+)", "\$1", "(\w+)", "\(\.\*\)"', expression):  # label_replace
        assert source in known, source
        known.add(made)
    assert labels <= known, f"{labels - known} of {expression}"


def test_every_rule_asks_for_what_is_exported(exported):
    for rule in ALL:
        check(rule["expr"], exported, set(RECORDS))


def test_rules_have_the_fields_that_prometheus_takes_and_names_of_their_own():
    for group in RULES["groups"]:
        assert set(group) == {"name", "rules"}
    for rule in ALL:
        fields = {"alert", "expr", "for", "labels", "annotations"} if "alert" in rule else {"record", "expr"}
        assert set(rule) == fields, "Prometheus loads no file with a field it does not know"
    assert len(ALERTS) + len(RECORDS) == len(ALL)
    assert all(re.fullmatch(r"\w+:\w+:\w+", name) for name in RECORDS), "level:metric:operations"


def test_alerts_fire_on_made_up_traffic_of_each_server_and_on_no_other():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not here: Debian's package prometheus has it")
    cases = Path(__file__).with_name("rules_test.yml")
    done = subprocess.run([promtool, "test", "rules", str(cases)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


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
        "rate(trtspec_queued_requests)",
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


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_every_panel_asks_for_what_is_exported(dashboard, exported):
    for panel in dashboard["panels"]:
        assert panel["targets"] and panel["title"] and panel["description"]
        for target in panel["targets"]:
            check(target["expr"], exported)
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            metrics, _ = read(target["expr"])
            summed = re.search(r"(?:sum|avg) by \((\w+)\)", target["expr"])
            kept = {summed[1]} if summed else set().union(*(exported[name] for name in metrics))
            assert shown <= kept, target


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_a_dashboard_can_be_imported(dashboard, exported):
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert all(x < 24 for x, _ in cells)
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    text = json.dumps(dashboard)
    assert set(re.findall(r"\$\{?(?!__)([a-z]+)", text)) == set(variables) == {"datasource", "model"}
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["model"]["definition"]).groups()
    assert label in exported[metric]


def test_dashboards_have_names_of_their_own():
    for name in ("uid", "title"):
        assert len({dashboard[name] for dashboard in DASHBOARDS.values()}) == len(DASHBOARDS)


def test_all_metrics_are_seen_somewhere(exported):
    """An exported family that no panel shows would be exported for nobody."""
    shown = [
        target["expr"] for board in DASHBOARDS.values() for p in board["panels"] for target in p["targets"]
    ]
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


def test_every_alert_is_documented():
    text = (DEPLOY / "README.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(Trtspec\w+)` \|", text, re.MULTILINE)) == set(ALERTS)
