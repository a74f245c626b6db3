"""A coordinator with a certificate, and all of its peers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from live.programs import KEY, PATIENCE, TESTS, TINY, Pool, Programs
from shoal import Pool as Client
from transports.certificates import Certificate, issue

ZEROS = ".sha256-" + "A" * 43


def shoal(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shoal", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def token_of(pool: Pool) -> str:
    """Return the token of the command that was printed."""
    words: list[str] = pool.ready["join"].split()
    return words[words.index("--token") + 1]


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    return issue(tmp_path / "tls")


@pytest.fixture
def pool(programs: Programs, certificate: Certificate) -> Pool:
    return programs.serve(*certificate.flags)


def test_printed_command_joins_and_local_commands_connect(
    programs: Programs, pool: Pool
) -> None:
    assert pool.url.startswith("https://")
    words = pool.ready["join"].split()
    assert words[:3] == ["shoal", "join", pool.url]
    worker = programs.run(
        *words[1:], "--json", "--name", "one", "--model", f"tiny={TINY}"
    )
    worker.event("joined")
    data = ("--data-dir", str(programs.folder / "data"))

    answered = shoal("chat", "ping", "--temperature", "0", "--url", pool.url, *data)

    assert answered.stdout == "pong\n"
    status = shoal("status", "--json", "--url", pool.url, *data)
    (joined,) = json.loads(status.stdout)["workers"]
    assert joined["protection"] == "noise"  # within TLS
    assert worker.terminate() == 0


def test_command_from_elsewhere_needs_the_authority(
    pool: Pool, certificate: Certificate, tmp_path: Path
) -> None:
    other = issue(tmp_path / "tls", "other")
    status_command = ("status", "--url", pool.url, "--api-key", KEY)

    assert (
        shoal(*status_command, "--cacert", str(certificate.authority)).returncode == 0
    )
    for flags in ((), ("--cacert", str(other.authority))):
        refused = shoal(*status_command, *flags)
        assert refused.returncode == 1
        assert "is not trusted" in refused.stderr
        assert "--cacert FILE" in refused.stderr


def test_stored_key_is_sent_only_to_its_coordinator(
    programs: Programs, pool: Pool, tmp_path: Path
) -> None:
    impostor = issue(tmp_path / "tls", "impostor")
    data = ("--data-dir", str(programs.folder / "data"))
    elsewhere = programs.run(
        "serve",
        "--json",
        "--port",
        "0",
        "--data-dir",
        str(programs.folder / "elsewhere"),
        *impostor.flags,
    )
    url = elsewhere.event("ready")["url"]

    refused = shoal("status", "--url", url, *data)

    assert refused.returncode == 1
    assert "is not trusted" in refused.stderr


def test_worker_rejects_a_certificate_other_than_its_tokens(
    programs: Programs, pool: Pool
) -> None:
    worker = pool.join("one", token="x" + ZEROS)

    assert worker.wait() == 1
    assert "is not the one in the token" in worker.errors


def test_token_with_a_fingerprint_is_never_sent_in_plaintext(
    programs: Programs,
) -> None:
    worker = programs.run(
        "join", "http://127.0.0.1:9", "--token", "x" + ZEROS, "--model", f"tiny={TINY}"
    )

    assert worker.wait() == 1
    assert "begins with https:// or wss://" in worker.errors


def test_worker_without_a_fingerprint_requires_an_authority(pool: Pool) -> None:
    worker = pool.join("one")

    assert worker.wait() == 1
    assert "is not signed by a trusted authority" in worker.errors
    assert "as the coordinator prints them" in worker.errors


def test_created_token_has_the_fingerprint(programs: Programs, pool: Pool) -> None:
    data = ("--data-dir", str(programs.folder / "data"))
    made = shoal("tokens", "create", "lab", "--url", pool.url, *data)
    words = made.stdout.partition("\n")[0].split()
    assert words[words.index("--token") + 1].endswith(token_of(pool)[-len(ZEROS) :])

    worker = programs.run(
        *words[1:], "--json", "--name", "one", "--model", f"tiny={TINY}"
    )

    worker.event("joined")


def test_plaintext_requests_are_ignored(pool: Pool) -> None:
    plain = shoal(
        "status", "--url", pool.url.replace("https", "http"), "--api-key", KEY
    )

    assert plain.returncode == 1
    assert "if it serves TLS, its URL begins with https://" in plain.stderr
    assert pool.program.terminate() == 0
    assert "Traceback" not in pool.program.errors
    assert "ERROR" not in pool.program.errors


def test_stale_certificate_is_forgotten(programs: Programs, pool: Pool) -> None:
    pool.program.terminate()
    data = programs.folder / "data"
    assert (data / "certificate.pem").exists()

    plain = programs.serve()

    assert plain.url.startswith("http://")
    assert not (data / "certificate.pem").exists()


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        ("one", None, "--tls-cert takes --tls-key beside it"),
        (None, "one-key", "--tls-key takes --tls-cert beside it"),
        ("none", "one-key", "none.pem: No such file or directory"),
        ("one", "none", "none.pem: No such file or directory"),
        ("one", "two-key", "it is not the key of the certificate"),
        ("one-key", "one", "it holds no certificate in PEM form"),
    ],
)
def test_error_names_an_invalid_certificate(
    programs: Programs, tmp_path: Path, cert: str | None, key: str | None, said: str
) -> None:
    folder = tmp_path / "tls"
    issue(folder)
    issue(folder, "two")
    flags = []
    for flag, name in (("--tls-cert", cert), ("--tls-key", key)):
        if name is not None:
            flags += [flag, str(folder / f"{name}.pem")]

    serve = programs.run(
        "serve", "--port", "0", "--data-dir", str(tmp_path / "data"), *flags
    )

    assert serve.wait() == 1
    assert said in serve.errors
    assert "Traceback" not in serve.errors


def test_functions_are_called_within_tls_and_on_a_separately_certified_port(
    programs: Programs, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    ports = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")
    pool = programs.serve(*certificate.flags, "--join-token", "join-me-please", *ports)
    token = token_of(pool)
    assert token.startswith("join-me-please.sha256-")
    for name, wire in (("http", "auto"), ("port", "macfleet")):
        tasks = ("--tasks", "tasks.demo_tasks", "--slots", "1", "--wire", wire)
        pool.join(name, *tasks, token=token).event("joined")

    with Client(pool.url, KEY, cacert=certificate.authority) as client:
        calls = [client.submit("demo.add", 20, 22) for _ in range(2)]
        assert [each.result(PATIENCE) for each in calls] == [42, 42]

    data = ("--data-dir", str(programs.folder / "data"))
    status = shoal("status", "--json", "--url", pool.url, *data)
    workers = json.loads(status.stdout)["workers"]
    # Noise also within TLS, which may end at a proxy.
    protections = {each["id"]: each["protection"] for each in workers}
    assert protections == {"shoal:http": "noise", "macfleet:port": "tls"}
