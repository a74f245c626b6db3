"""The page about metrics, and the examples for Grafana, against real metrics."""

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from gateway.keys import CHAT
from gateway.serving import Pool
from shoal.domain.outcome import Usage
from shoal.domain.vocabulary import (
    AnswerChunk,
    CancelJob,
    Command,
    Completed,
    HealthReported,
    Joined,
    RunJob,
)
from shoal.domain.worker import CHAT_ONLY, MachineHealth, Offer

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "observability.md"
SECTION = PAGE.read_text("utf-8").partition("\n## Traces\n")[0]
GRAFANA = ROOT / "examples" / "grafana"


class MeteredWorker:
    """A worker that reports its health, and how many tokens it read and wrote."""

    accepts = frozenset({CancelJob})

    def __init__(self, pool: Pool) -> None:
        self._loop = asyncio.get_running_loop()
        self.port = pool.hub.connect(self, "wire")
        offer = Offer(CHAT_ONLY, models=frozenset({"m1"}))
        self.port.on_event(Joined("one", offer))
        self.port.on_event(HealthReported(MachineHealth(50.0, 25.0, 0, 60.0)))

    def send(self, message: Command) -> bool:
        if isinstance(message, RunJob):
            key = (message.job_id, message.lease)
            for event in (
                AnswerChunk(*key, ["a"]),
                Completed(*key, usage=Usage(2, 64), rest=("b",)),
            ):
                self._loop.call_soon(self.port.on_event, event)
        return True

    def disconnect(self, reason: str, code: int, text: str) -> None:
        self.port.on_disconnect(reason)


@pytest.fixture
async def metrics(pool: Pool) -> Mapping[str, Metric]:
    """The metrics of a coordinator that has served requests, by name."""
    MeteredWorker(pool)
    await pool.wait_joined()
    url = f"{pool.url}/v1/chat/completions"
    for body in (CHAT, CHAT | {"stream": True}):
        async with pool.session.post(url, json=body, headers=pool.headers()) as got:
            assert got.status == 200
            await got.read()
    async with pool.session.get(f"{pool.url}/metrics", headers=pool.headers()) as got:
        text = await got.text()
    return {each.name: each for each in text_string_to_metric_families(text)}


def labels_of(metric: Metric) -> frozenset[str]:
    """Return the labels of a metric, without the buckets of histograms."""
    return frozenset(name for each in metric.samples for name in each.labels) - {"le"}


async def test_the_page_has_each_metric_with_its_type_and_labels(
    metrics: Mapping[str, Metric],
) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|([^|]*)\| .+ \|$", SECTION, re.M)
    described = {
        name: (type_, frozenset(re.findall(r"`(\w+)`", labels)))
        for name, type_, labels in rows
        if name in metrics or not name.startswith("process_")  # of Linux alone
    }

    assert described == {
        name: (metric.type, labels_of(metric)) for name, metric in metrics.items()
    }


def queries() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield each query of the examples, where it is, and the labels of its legend."""
    dashboard = json.loads((GRAFANA / "shoal.json").read_text("utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            legend = frozenset(re.findall(r"{{\s*(\w+)\s*}}", target["legendFormat"]))
            query = target["expr"].replace("$__rate_interval", "1m")
            yield panel["title"], query, legend
    alerts = yaml.safe_load((GRAFANA / "alerts.yml").read_text("utf-8"))
    for group in alerts["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"], frozenset()


def parts_of(expression: Any) -> Iterator[Any]:
    """Yield an expression and all that it consists of."""
    yield expression
    inner: list[Any] = []
    match expression:
        case promql_parser.BinaryExpr():
            inner = [expression.lhs, expression.rhs]
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr():
            inner = [expression.expr]
        case promql_parser.Call():
            inner = expression.args
        case promql_parser.MatrixSelector():
            inner = [expression.vector_selector]
        case _:
            assert isinstance(
                expression,
                promql_parser.VectorSelector | promql_parser.NumberLiteral,
            ), expression
    for each in inner:
        yield from parts_of(each)


async def test_queries_use_metrics_labels_and_values_that_exist(
    metrics: Mapping[str, Metric],
) -> None:
    samples = [sample for metric in metrics.values() for sample in metric.samples]
    found: dict[str, dict[str, set[str]]] = {}
    for sample in samples:
        names = found.setdefault(sample.name, {})
        for label, value in sample.labels.items():
            names.setdefault(label, set()).add(value)
    # What Prometheus adds by itself.
    found["up"] = {"job": {"shoal"}}

    for place, query, legend in queries():
        parts = [*parts_of(promql_parser.parse(query))]
        selectors = [p for p in parts if isinstance(p, promql_parser.VectorSelector)]
        assert selectors, place
        for selector in selectors:
            assert selector.name in found, f"{place}: {query}"
            known = found[selector.name]
            for matcher in selector.matchers.matchers:
                assert matcher.name in known, f"{place}: {query}"
                if matcher.name == "state":
                    assert matcher.value in known["state"], f"{place}: {query}"
            grouped = {
                label
                for part in parts
                if isinstance(part, promql_parser.AggregateExpr) and part.modifier
                for label in part.modifier.labels
            }
            assert grouped | legend <= known.keys(), f"{place}: {query}"


def test_every_metric_of_shoal_is_on_the_dashboard_or_in_an_alert() -> None:
    used = " ".join(query for _, query, _ in queries())
    named = re.findall(r"^\| `(\w+)` \|", SECTION, re.M)

    unused = {name for name in named if name.startswith("shoal") and name not in used}

    assert unused == {"shoal_build_info"}
