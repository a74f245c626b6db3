"""`shoal serve --tls auto`: who trusts it, by what, and what an impostor gets."""

import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from live.programs import KEY, PATIENCE, TESTS, TINY, TOKEN, Pool, Programs
from shoal import ConnectionLost
from shoal import Pool as Client
from shoal.domain.credentials import with_fingerprint
from transports.certificates import Certificate, issue

OPENAI = """
import os, sys
from openai import OpenAI
with OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0) as client:
    print([model.id for model in client.models.list()])
"""
HTTPX = """
import ssl, sys, httpx
from openai import OpenAI
trusted = httpx.Client(verify=ssl.create_default_context(cafile=sys.argv[3]))
with OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], http_client=trusted) as client:
    print([model.id for model in client.models.list()])
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    running = Programs(tmp_path_factory.mktemp("pool"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def pool(shared: Programs) -> Pool:
    """A shared coordinator."""
    return shared.serve("--tls", "auto")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Mapping[str, str]:
    """The environment of another machine: without the coordinator's data folder."""
    return {**os.environ, "SHOAL_DATA_DIR": str(tmp_path / "elsewhere")}


def run(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=environment,
    )


def shoal(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "shoal", *arguments, environment=environment)


def test_printed_lines_are_all_that_other_machines_need(
    shared: Programs,
    programs: Programs,
    pool: Pool,
    elsewhere: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    key = pool.ready["pinned_key"]
    join = pool.ready["join"].split()[1:]
    flags = ("--json", "--name", "one", "--model", f"tiny={TINY}")
    programs.run(*join, *flags).event("joined")
    calls = ("--json", "--name", "calls", "--tasks", "tasks.demo_tasks")
    programs.run(*join, *calls).event("joined")

    command = ("chat", "ping", "--temperature", "0", "--url", pool.url)
    variables = {**elsewhere, "SHOAL_API_KEY": key}
    assert shoal(*command, environment=variables).stdout == "pong\n"
    assert shoal(*command, "--api-key", key, environment=elsewhere).returncode == 0
    with Client(pool.url, key) as client:
        assert client.submit("demo.add", 20, 22).result(PATIENCE) == 42
    # On the coordinator's machine, its folder says enough.
    data = ("--data-dir", str(shared.data))
    assert shoal("status", *data).returncode == 0


def test_other_programs_trust_the_authority(pool: Pool) -> None:
    base, authority = f"{pool.url}/v1", pool.ready["authority"]
    plain = (sys.executable, "-c", OPENAI, base, KEY)
    trusting = {**os.environ, "SSL_CERT_FILE": authority}

    assert run(*plain, environment=trusting).stdout == "[]\n"
    assert run(sys.executable, "-c", HTTPX, base, KEY, authority).stdout == "[]\n"
    assert "APIConnectionError" in run(*plain).stderr
    by_name = pool.url.replace("127.0.0.1", "localhost")
    status = ("status", "--url", by_name, "--api-key", KEY)
    assert shoal(*status, "--cacert", authority).returncode == 0
    assert "is not trusted" in shoal(*status).stderr


def test_tokens_and_keys_stay_valid_after_a_restart(
    programs: Programs, elsewhere: Mapping[str, str]
) -> None:
    pool = programs.serve("--tls", "auto")
    worker = programs.run(
        *pool.ready["join"].split()[1:], "--json", "--model", f"tiny={TINY}"
    )
    worker.event("joined")
    pool.program.terminate()

    again = programs.serve("--tls", "auto", port=pool.port)

    worker.event("joined")
    assert again.ready["pinned_key"] == pool.ready["pinned_key"]
    assert again.ready["join"] == pool.ready["join"]
    status = ("status", "--url", again.url, "--api-key", again.ready["pinned_key"])
    assert shoal(*status, environment=elsewhere).returncode == 0


def test_created_keys_have_the_fingerprint(
    shared: Programs, pool: Pool, elsewhere: Mapping[str, str]
) -> None:
    made = shoal("keys", "create", "ada", "--data-dir", str(shared.data)).stdout
    pinned = made.split()[-1]

    assert pinned.startswith(f"{made.split()[0]}.sha256-")
    used = shoal(
        *("jobs", "ls", "--url", pool.url, "--api-key", pinned), environment=elsewhere
    )
    assert used.returncode == 0


class ManInTheMiddle:
    """A server with another certificate; counts the bytes that it can decrypt."""

    def __init__(self, certificate: Certificate) -> None:
        self.connections = 0
        self.decrypted = b""
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate.file, certificate.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            plain.settimeout(5.0)
            with (
                suppress(OSError),
                self._context.wrap_socket(plain, server_side=True) as secure,
            ):
                self.decrypted += secure.recv(1 << 16)


@pytest.fixture
def man_in_the_middle(tmp_path: Path) -> Iterator[ManInTheMiddle]:
    listening = ManInTheMiddle(issue(tmp_path / "forged"))
    yield listening
    listening.close()


PROGRAMS = {
    "status": ("status", "--api-key", "{key}", "--url", "{url}"),
    "chat": ("chat", "hi", "--api-key", "{key}", "--url", "{url}"),
    "functions": ("tasks", "ls", "--api-key", "{key}", "--url", "{url}"),
    "models": ("join", "{url}", "--token", "{token}", "--model", f"tiny={TINY}"),
    "tasks": ("join", "{url}", "--token", "{token}", "--tasks", "tasks.demo_tasks"),
    "download": ("models", "get", "m", "--from", "{url}", "--token", "{token}"),
}


OWN = b"the coordinator's own key".ljust(32)
PINNED_KEY, PINNED_TOKEN = with_fingerprint(KEY, OWN), with_fingerprint(TOKEN, OWN)


@pytest.mark.parametrize("program", PROGRAMS)
def test_man_in_the_middle_gets_nothing(
    man_in_the_middle: ManInTheMiddle,
    elsewhere: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    program: str,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    places = {
        "url": f"https://127.0.0.1:{man_in_the_middle.port}",
        "key": PINNED_KEY,
        "token": PINNED_TOKEN,
    }
    command = [each.format(**places) for each in PROGRAMS[program]]

    variables = {**elsewhere, "PYTHONPATH": os.environ["PYTHONPATH"]}
    refused = shoal(*command, environment=variables)

    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "is not the one in the token or API key" in refused.stderr
    assert "ask its operator for a new" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert man_in_the_middle.connections > 0
    assert man_in_the_middle.decrypted == b""


def test_man_in_the_middle_gets_nothing_of_python_programs(
    man_in_the_middle: ManInTheMiddle,
) -> None:
    url = f"https://127.0.0.1:{man_in_the_middle.port}"

    with (
        pytest.raises(ConnectionLost, match="is not the one in the token or API key"),
        Client(url, PINNED_KEY) as client,
    ):
        client.submit("demo.add", 1, 2).result(PATIENCE)

    assert man_in_the_middle.connections > 0
    assert man_in_the_middle.decrypted == b""
