"""A real Prometheus reads a real coordinator, and runs the queries of the examples."""

import json
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from gateway.metrics.test_observability import GRAFANA, queries
from harness.ports import free_port
from live.programs import KEY, GatedModel, Programs, eventually
from models.tiny_answers import ANSWERS

STARTING = 503
ALERT = re.compile(r" (>|==) ")  # gives nothing while all is well
NOT_HERE = re.compile("prices|error_type|worker_t|time_to_first|time_per_output")
"""Queries about prices, errors, the heat and the speed of workers, and streams."""


class Prometheus:
    """Prometheus with the configuration of the examples, for a coordinator's port."""

    def __init__(self, folder: Path, port: int) -> None:
        folder.mkdir()
        self._log = folder / "log"
        (folder / "shoal.key").write_text(KEY)
        text = (GRAFANA / "prometheus.yml").read_text("utf-8")
        for before, after in (
            ("127.0.0.1:4010", f"127.0.0.1:{port}"),
            ("scrape_interval: 15s", "scrape_interval: 1s"),
        ):
            assert before in text
            text = text.replace(before, after)
        (folder / "prometheus.yml").write_text(text)
        self._port = free_port()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *("prometheus", "--config.file=prometheus.yml"),
                    "--storage.tsdb.path=data",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    def run(self, query: str) -> list[dict[str, Any]]:
        """Run a query; return the samples that it gives now."""
        url = (
            f"http://127.0.0.1:{self._port}/api/v1/query?{urlencode({'query': query})}"
        )
        try:
            with urlopen(url, timeout=30) as got:
                answer = json.load(got)
        except HTTPError as error:
            if error.code == STARTING:
                raise URLError("not ready") from error
            raise AssertionError(f"{query}: {error.read().decode()}") from error
        samples: list[dict[str, Any]] = answer["data"]["result"]
        return samples

    @property
    def is_up(self) -> bool:
        """Whether it has read the coordinator's metrics."""
        try:
            return self.value("up") == 1
        except URLError:
            assert self._process.poll() is None, self._log.read_text()
            return False

    def value(self, query: str) -> float:
        """Return the value of a query that gives one sample; 0: it gives none."""
        samples = self.run(query)
        return float(samples[0]["value"][1]) if samples else 0.0

    def reads(self, query: str, value: float) -> bool:
        """Say whether a query gives this value by now."""
        return self.value(query) == value

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def fast_model() -> Iterator[GatedModel]:
    model = GatedModel(pause=1 << 20)
    yield model
    model.close()


def test_queries_of_the_examples_run_in_prometheus(
    programs: Programs, fast_model: GatedModel
) -> None:
    rules = GRAFANA / "alerts.yml"
    subprocess.run(["promtool", "check", "rules", str(rules)], check=True)
    pool = programs.serve()
    pool.joined("one", *fast_model.flags)
    prometheus = Prometheus(programs.folder / "prometheus", pool.port)
    try:
        eventually(lambda: prometheus.is_up, "Prometheus reads the metrics")
        question = next(iter(ANSWERS))
        done = 'shoal_facts_total{fact="JobCompleted"}'
        for number in (1, 2):  # a rate needs two values
            with pool.client() as client:
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": question}]
                )
            eventually(partial(prometheus.reads, done, number), "it reads the chat")
        rate = "sum(rate(shoal_tokens_total[1m]))"
        eventually(lambda: prometheus.value(rate) > 0, "the rate of tokens")

        results = {query: prometheus.run(query) for _, query, _ in queries()}
    finally:
        prometheus.close()

    assert results["min(shoal_ready)"][0]["value"][1] == "1"
    silent = [
        query
        for query, samples in results.items()
        if not (samples or ALERT.search(query) or NOT_HERE.search(query))
    ]
    assert silent == []
