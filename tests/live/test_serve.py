"""``shoal serve`` as a process: how it starts, refuses to start, and stops."""

import json
import os
import re
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pexpect
import pytest

from harness.slow_imports import openai
from live.programs import (
    KEY,
    PATIENCE,
    GatedModel,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS

STORY = "Tell me a story."

REFUSED = "path='/v1/models' status=401"  # a line of the log

Terminal = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """Starts a coordinator at a terminal; its data folder is ``data``."""
    running: list[pexpect.spawn[str]] = []

    def start(*flags: str) -> "pexpect.spawn[str]":
        folder = ["--data-dir", str(tmp_path / "data")]
        serve = pexpect.spawn(
            sys.executable,
            ["-m", "shoal", "serve", "--port", "0", *folder, *flags],
            encoding="utf-8",
            timeout=PATIENCE,
            dimensions=(50, 200),
            env={**os.environ, "TERM": "xterm"},
        )
        running.append(serve)
        return serve

    yield start
    for each in running:
        each.close(force=True)


@pytest.mark.short
def test_ready_line_has_url_key_and_ports(programs: Programs) -> None:
    folder = programs.folder / "data"
    ports = ("--port", "0", "--ollama-port", "0")
    serve = programs.run("serve", "--json", *ports, "--data-dir", str(folder))

    ready = serve.event("ready")

    keys = {"event", "url", "api_key", "join", "dashboard", "ports"}
    assert ready.keys() == keys
    assert ready["dashboard"].startswith(f"{ready['url']}/#signin=")
    assert ready["url"] == f"http://127.0.0.1:{ready['ports']['http']}"
    assert all(isinstance(port, int) for port in ready["ports"].values())
    assert {"http", "ollama", "tealenet"} <= ready["ports"].keys()
    assert ready["api_key"].startswith("sk-shoal-")
    assert ready["join"].startswith(f"shoal join {ready['url']} --token ")
    for secret in ("api-key", "join-token"):
        mode = stat.S_IMODE((folder / secret).stat().st_mode)
        assert mode == 0o600, f"{secret} can be read by others"
    assert serve.terminate() == 0


def test_secrets_survive_a_restart(programs: Programs) -> None:
    folder = str(programs.folder / "data")
    ready = []

    tokens = []
    for _ in range(2):
        serve = programs.run("serve", "--json", "--port", "0", "--data-dir", folder)
        ready.append(serve.event("ready"))
        tokens.append((programs.folder / "data" / "join-token").read_text())
        serve.terminate()

    assert ready[0]["api_key"] == ready[1]["api_key"]
    assert tokens[0] == tokens[1]
    assert tokens[0].strip() not in ready[0]["join"]  # it is not limited


def test_job_of_a_silent_worker_goes_to_another(
    programs: Programs,
) -> None:
    model = GatedModel(0)
    pool = programs.serve("--hedge-after", "0.2")
    for name in ("one", "two"):
        pool.joined(name, *model.flags)

    with pool.client() as client, ThreadPoolExecutor() as threads:
        pending = threads.submit(_whole, client)
        eventually(lambda: model.requests == 2, "a second worker has the job")
        model.go_on.set()
        answer = pending.result()
    model.close()

    assert answer == "".join(ANSWERS[STORY])


def test_given_key_is_stored_for_local_commands(
    programs: Programs,
) -> None:
    folder = programs.folder / "data"
    start = ["serve", "--json", "--port", "0", "--data-dir", str(folder)]
    serve = programs.run(*start, "--api-key", "sk-mine")

    url = serve.event("ready")["url"]
    status = programs.run("status", "--url", url, "--data-dir", str(folder))
    assert status.wait() == 0
    serve.terminate()

    assert programs.run(*start).event("ready")["api_key"] == "sk-mine"
    refused = programs.run(*start, "--api-key", "two words")
    assert refused.wait() == 1
    assert "without spaces" in refused.errors


def test_used_port_is_an_error_with_a_remedy(programs: Programs) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        folder = str(programs.folder / "data")
        serve = programs.run("serve", "--port", port, "--data-dir", folder)

        assert serve.wait() == 1

    assert port in serve.errors
    assert "--port" in serve.errors
    assert "Traceback" not in serve.errors


def test_second_coordinator_on_the_same_data_is_rejected(programs: Programs) -> None:
    programs.serve()
    folder = str(programs.folder / "data")

    second = programs.run("serve", "--port", "0", "--data-dir", folder)

    assert second.wait() == 1
    assert "--data-dir" in second.errors
    assert "is in use" in second.errors
    assert "Traceback" not in second.errors


@pytest.mark.short
@pytest.mark.skipif(sys.platform == "win32", reason="pexpect needs a pty")
def test_log_leaves_the_join_command_in_sight(
    tmp_path: Path, terminal: Terminal
) -> None:
    log = tmp_path / "data" / "serve.log"

    serve = terminal()
    url = _url(serve)
    serve.expect_exact(f"shoal join {url} --token ")
    serve.expect_exact(f"`shoal join --data-dir {tmp_path / 'data'}` is enough.")
    serve.expect_exact(f"Log: {log}\r\n")
    _request_without_key(url)
    serve.sendintr()
    serve.expect_exact("stopping")
    serve.expect(pexpect.EOF)

    assert REFUSED not in str(serve.before)
    assert REFUSED in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


@pytest.mark.skipif(sys.platform == "win32", reason="pexpect needs a pty")
@pytest.mark.parametrize("flags", [["--log-file", "-"], ["--log-level", "info"]])
def test_log_is_shown_at_the_terminal_if_asked_for(
    tmp_path: Path, terminal: Terminal, flags: list[str]
) -> None:
    serve = terminal(*flags)
    _request_without_key(_url(serve))

    serve.expect_exact(REFUSED)

    assert not (tmp_path / "data" / "serve.log").exists()


def test_log_may_go_to_a_file_of_the_users_choice(
    programs: Programs, tmp_path: Path
) -> None:
    log = tmp_path / "mine.log"
    data = ("--data-dir", str(programs.data))
    serve = programs.run(
        "serve", "--json", "--port", "0", *data, "--log-file", str(log)
    )
    url = serve.event("ready")["url"]

    _request_without_key(url)

    assert serve.terminate() == 0
    assert REFUSED in log.read_text()
    assert REFUSED not in serve.errors


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "many"], "--port: expected a whole number"),
        (["--port", "70000"], "--port 70000: expected at most 65535"),
        (["--port", "-1"], "--port"),
        (["--queue-wait", "nan"], "--queue-wait: expected a number"),
        (["--host", "host.invalid"], "cannot listen on host.invalid"),
        (["--config", "/none.toml"], "--config /none.toml: no such file"),
        (["--data-dir", "/dev/null/x"], "--data-dir /dev/null/x: Not a directory"),
        (["--log-file", "/none/x"], "--log-file /none/x: No such file"),
        (["--moderation", "/none"], "--moderation /none"),
        (["--grandsage-silence", "x"], "--grandsage-silence: expected a number"),
    ],
)
def test_wrong_setting_is_an_error_that_names_it(
    programs: Programs, flags: list[str], said: str
) -> None:
    folder = ["--data-dir", str(programs.folder / "data")]
    serve = programs.run("serve", "--port", "0", *folder, *flags)

    assert serve.wait() == 1

    assert said in serve.errors
    assert "Traceback" not in serve.errors


def test_damaged_database_is_an_error_that_names_the_file(programs: Programs) -> None:
    folder = programs.folder / "data"
    folder.mkdir()
    (folder / "shoal.db").write_bytes(b"no database " * 1000)

    serve = programs.run("serve", "--port", "0", "--data-dir", str(folder))

    assert serve.wait() == 74
    assert "shoal.db" in serve.errors
    assert "Traceback" not in serve.errors


def test_empty_secret_admits_no_worker(programs: Programs) -> None:
    folder = programs.folder / "data"
    folder.mkdir()
    (folder / "join-token").touch()

    serve = programs.run("serve", "--port", "0", "--data-dir", str(folder))

    assert serve.wait() == 1
    assert "join-token is empty" in serve.errors


def test_settings_are_read_from_a_file(programs: Programs) -> None:
    file = programs.folder / "shoal.toml"
    data = json.dumps(str(programs.folder / "elsewhere"))
    file.write_text(f'[serve]\nport = 0\ndata_dir = {data}\napi_key = "sk-file"\n')

    serve = programs.run("serve", "--json", "--config", str(file))

    assert serve.event("ready")["api_key"] == "sk-file"
    assert (programs.folder / "elsewhere" / "shoal.db").exists()


def test_stop_finishes_open_answers(programs: Programs, slow_model: GatedModel) -> None:
    pool = programs.serve("--drain", str(PATIENCE))  # a command starts meanwhile
    pool.joined("one", *slow_model.flags)
    with pool.client() as client, answer_to(client, STORY) as stream:
        pieces = text_in(stream)
        first = next(pieces)

        pool.program.process.terminate()
        eventually(lambda: _stopping(pool.url), "it stops taking work")
        asked = programs.run("chat", "ping", "--url", pool.url, "--api-key", KEY)
        eventually(lambda: "is stopping" in asked.errors, "a question waits")
        slow_model.go_on.set()

        assert first + "".join(pieces) == ANSWERS[STORY]
    assert pool.program.wait() == 0
    assert asked.terminate() == 130  # it waits for the next start


def _stopping(url: str) -> bool:
    try:
        with urlopen(f"{url}/readyz"):
            return False
    except HTTPError as error:
        with error:
            return b"stopping" in error.read()


def test_stop_has_a_time_limit(programs: Programs, slow_model: GatedModel) -> None:
    pool = programs.serve("--drain", "0.5")
    pool.joined("one", *slow_model.flags)
    with pool.client() as client, answer_to(client, STORY) as stream:
        next(text_in(stream))

        assert pool.program.terminate() == 0


def test_second_signal_stops_at_once(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    pool.joined("one", *slow_model.flags)
    with pool.client() as client, answer_to(client, STORY) as stream:
        next(text_in(stream))
        pool.program.process.terminate()
        eventually(lambda: "stopping" in pool.program.errors, "it is stopping")

        pool.program.process.terminate()

        assert pool.program.wait() == 130
    assert "Traceback" not in pool.program.errors


def test_wrong_key_is_refused(programs: Programs) -> None:
    pool = programs.serve()

    with pool.client() as client:
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sk-wrong").models.list()

        assert client.models.list().data == []


def _whole(client: "openai.OpenAI") -> str:
    with answer_to(client, STORY) as chunks:
        return "".join(text_in(chunks))


def _url(serve: "pexpect.spawn[str]") -> str:
    """Wait until a coordinator at a terminal announces its URL."""
    serve.expect(r"Shoal is ready at (http://\S+)\r")
    assert isinstance(serve.match, re.Match)
    return serve.match[1]


def _request_without_key(url: str) -> None:
    """Have the coordinator log a request."""
    with pytest.raises(HTTPError, match="401"):
        urlopen(f"{url}/v1/models", timeout=PATIENCE)
