"""``shoal serve`` as a process: how it starts, refuses to start, and stops."""

import json
import socket
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import AuthenticationError, OpenAI

from live.programs import (
    KEY,
    GatedModel,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS

STORY = "Tell me a story."


@pytest.mark.short
def test_ready_line_has_url_key_and_ports(programs: Programs) -> None:
    folder = programs.folder / "data"
    ports = ("--port", "0", "--ollama-port", "0")
    serve = programs.run("serve", "--json", *ports, "--data-dir", str(folder))

    ready = serve.event("ready")

    assert ready.keys() == {"event", "url", "api_key", "join", "ports"}
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

    for _ in range(2):
        serve = programs.run("serve", "--json", "--port", "0", "--data-dir", folder)
        ready.append(serve.event("ready"))
        serve.terminate()

    assert ready[0]["api_key"] == ready[1]["api_key"]
    assert ready[0]["join"].split()[-1] == ready[1]["join"].split()[-1]


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--port", "many"], "--port: expected a whole number"),
        (["--port", "70000"], "--port 70000: expected at most 65535"),
        (["--port", "-1"], "--port"),
        (["--queue-wait", "nan"], "--queue-wait: expected a number"),
        (["--host", "host.invalid"], "cannot listen on host.invalid"),
        (["--log-level", "loud"], "--log-level loud: expected debug, info"),
        (["--config", "/none.toml"], "--config /none.toml: no such file"),
        (["--data-dir", "/dev/null/x"], "--data-dir /dev/null/x: Not a directory"),
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

    assert serve.wait() == 1
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
    pool = programs.serve()
    pool.joined("one", *slow_model.flags)
    with pool.client() as client, answer_to(client, STORY) as stream:
        pieces = text_in(stream)
        first = next(pieces)

        pool.program.process.terminate()
        eventually(lambda: _stopping(programs, pool.url), "it stops taking work")
        slow_model.go_on.set()

        assert first + "".join(pieces) == ANSWERS[STORY]
    assert pool.program.wait() == 0


def _stopping(programs: Programs, url: str) -> bool:
    status = programs.run("chat", "ping", "--url", url, "--api-key", KEY)
    assert status.wait() == 1
    return "stopping" in status.errors


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
        with pytest.raises(AuthenticationError):
            client.with_options(api_key="sk-wrong").models.list()

        assert client.models.list().data == []


def _whole(client: OpenAI) -> str:
    with answer_to(client, STORY) as chunks:
        return "".join(text_in(chunks))
