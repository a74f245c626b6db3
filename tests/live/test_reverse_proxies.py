"""A coordinator behind nginx and behind Caddy, with the files of the examples.

The proxies are those of the system; `make test-long` installs them.
"""

import hashlib
import os
import shutil
import ssl
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import shoal
from harness.slow_imports import openai
from live.programs import (
    KEY,
    PATIENCE,
    TESTS,
    TOKEN,
    GatedModel,
    Pool,
    Programs,
    answer_to,
    text_in,
)
from live.reverse_proxies import WRITERS, reverse_proxy
from models.tiny_answers import ANSWERS
from tasks.demo_tasks import add
from transports.certificates import Certificate, issue

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Debian's proxies"
)

QUESTION = max(ANSWERS, key=lambda question: len(ANSWERS[question]))
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Certificate:
    """A certificate of an authority that the system's programs trust."""
    certificate = issue(tmp_path / "tls", host="localhost")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.authority))
    return certificate


@pytest.fixture
def pool(programs: Programs) -> Pool:
    """A coordinator that is reached over HTTP alone, as from another network."""
    flags = ("--trusted-proxy", "127.0.0.1", "--allowed-host", "pool.example.com")
    return programs.serve(*flags, "--no-tealenet-lan", "--no-discovery")


@pytest.fixture(params=[*WRITERS])
def url(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    pool: Pool,
    certificate: Certificate,
) -> Iterator[str]:
    kind = request.param
    assert shutil.which(kind), f"{kind} is missing: apt-get install nginx-light caddy"
    served = [f"127.0.0.1:{pool.port}"]
    with reverse_proxy(kind, tmp_path / kind, served, certificate) as address:
        yield address


@pytest.fixture
def http(url: str, certificate: Certificate) -> Iterator[httpx.Client]:
    """A client that trusts the certificate of the proxy."""
    context = ssl.create_default_context(cafile=str(certificate.authority))
    with httpx.Client(
        base_url=url, headers=HEADERS, verify=context, timeout=PATIENCE
    ) as client:
        yield client


def join(programs: Programs, url: str, *flags: str) -> dict[str, Any]:
    """Start a worker that reaches the coordinator by the proxy alone."""
    worker = programs.run(
        "join", url, "--json", "--name", "one", "--token", TOKEN, *flags
    )
    return worker.event("joined")


def test_chats_workers_and_events_pass_as_they_come(
    programs: Programs,
    url: str,
    http: httpx.Client,
    certificate: Certificate,
    slow_model: GatedModel,
) -> None:
    join(programs, url, *slow_model.flags)
    context = ssl.create_default_context(cafile=str(certificate.authority))
    client = openai.OpenAI(
        base_url=f"{url}/v1",
        api_key=KEY,
        max_retries=0,
        http_client=httpx.Client(verify=context, timeout=PATIENCE),
    )
    with client, answer_to(client, QUESTION) as chunks:
        pieces = text_in(chunks)
        text = ""
        while text != "".join(ANSWERS[QUESTION][:5]):  # the model waits after these
            text += next(pieces)

        job = chunks.response.headers["x-shoal-job"]
        with http.stream("GET", f"/v1/jobs/{job}/events") as events:
            assert events.headers["content-type"].startswith("text/event-stream")
            named = [*_until(events.iter_lines(), "event: running")]
        assert "event: assigned" in named

        slow_model.go_on.set()
        text += "".join(pieces)

    assert text == "".join(ANSWERS[QUESTION])


def test_dashboard_follows_the_pool_through_a_proxy(
    pool: Pool, url: str, certificate: Certificate
) -> None:
    context = ssl.create_default_context(cafile=str(certificate.authority))
    page = {"Origin": url, "x-shoal-page": "1"}
    with httpx.Client(base_url=url, verify=context, timeout=PATIENCE) as browser:
        assert "<html" in browser.get("/").text
        signed = browser.post("/dashboard/session", json={"api_key": KEY}, headers=page)
        assert signed.headers["set-cookie"].startswith("__Host-shoal-session")

        with browser.stream("GET", "/admin/live") as live:
            lines = live.iter_lines()
            assert "event: snapshot" in [*_until(lines, "event: snapshot")]
            pool.joined("one")
            assert "event: facts" in [*_until(lines, "event: facts")]


def test_functions_are_called_and_offered_through_a_proxy(
    programs: Programs,
    url: str,
    certificate: Certificate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    join(programs, url, "--tasks", "tasks.demo_tasks")

    with shoal.Pool(url, api_key=KEY, cacert=certificate.authority) as client:
        assert client.submit(add, 1, 2).result(PATIENCE) == 3


def test_large_values_pass(http: httpx.Client) -> None:
    value = bytes(64 << 20)
    digest = hashlib.sha256(value).hexdigest()

    stored = http.put(f"/v1/blobs/{digest}", content=value)

    assert stored.status_code == 204, stored.text


def test_the_client_is_the_one_that_the_proxy_names(
    http: httpx.Client,
) -> None:
    """A header of the client's own does not hide it."""
    for _ in range(12):
        refused = http.get(
            "/v1/models",
            headers={"Authorization": "Bearer wrong", "X-Forwarded-For": "203.0.113.9"},
        )
        assert refused.status_code in (401, 429), refused.text
    assert http.get("/v1/models").status_code == 200


def _until(lines: Iterator[str], last: str) -> Iterator[str]:
    for line in lines:
        yield line
        if line == last:
            return
