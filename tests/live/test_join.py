"""``shoal join`` as a process: real workers, killed and restarted."""

import json
import signal
import socket
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.slow_imports import openai
from live import laws
from live.programs import (
    KEY,
    PATIENCE,
    TINY,
    TOKEN,
    GatedModel,
    Pool,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS

STORY = "Tell me a story."
ODD: tuple[object, ...] = ("\0", -1, 2**64, 0.5, [[]], {"a": {}})


@pytest.mark.parametrize("question", ANSWERS)
def test_official_client_gets_the_exact_text(pool: Pool, question: str) -> None:
    with pool.client() as client, answer_to(client, question) as stream:
        assert "".join(text_in(stream)) == ANSWERS[question]


def test_unstreamed_answer_is_the_same(pool: Pool) -> None:
    with pool.client() as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": STORY}],
            temperature=0,
        )

    assert answer.choices[0].message.content == ANSWERS[STORY]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 100


def test_wrong_token_ends_the_worker_with_a_hint(pool: Pool) -> None:
    worker = pool.join("two", token="wrong")

    refused = json.loads(worker.line() or "{}")  # first: no model was loaded

    assert refused["event"] == "refused"
    assert worker.wait() == 1
    assert "--token" in refused["reason"]
    assert "Traceback" not in worker.errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "unknown protocol"),
        (["http://"], "no host"),
        (["http://127.0.0.1:1", "--wire", "pigeon"], "--wire pigeon"),
        (["http://127.0.0.1:1", "--slots", "-1"], "--slots: expected"),
        (["http://127.0.0.1:1", "--model", "x=/none.gguf"], "/none.gguf"),
        (["http://127.0.0.1:1", "--model", "x"], "give its file"),
        (["http://127.0.0.1:1", "--engine", "magic"], "'magic'"),
        (["http://127.0.0.1:1", "--model", "=x"], "expected NAME or NAME=PATH"),
        (
            ["http://127.0.0.1:1", "--engine", "http://127.0.0.1:1/v1"],
            "coordinator itself",
        ),
        (["http://127.0.0.1:1", "--engine", "http://127.0.0.1:2"], "cannot be reached"),
    ],
)
def test_wrong_argument_is_an_error_that_names_it(
    programs: Programs, arguments: list[str], said: str
) -> None:
    worker = programs.run("join", *arguments)

    assert worker.wait() == 1
    assert said in worker.errors
    assert "Traceback" not in worker.errors


@pytest.mark.parametrize("tls", ["off", "auto"])
def test_url_of_this_machines_coordinator_needs_no_token(
    programs: Programs, monkeypatch: pytest.MonkeyPatch, tls: str
) -> None:
    # The token is one that the coordinator has made.
    data = ("--data-dir", str(programs.data))
    flags = ("--json", "--port", "0", "--api-key", KEY, "--tls", tls)
    url = programs.run("serve", *flags, *data).event("ready")["url"]
    monkeypatch.setenv("SHOAL_DATA_DIR", str(programs.data))

    for number, host in enumerate(("127.0.0.1", "localhost")):
        name = f"worker{number}"
        typed = url.replace("127.0.0.1", host)
        worker = programs.run(
            *("join", typed, "--json", "--name", name, "--model", f"tiny={TINY}")
        )
        assert worker.event("joined")["name"] == name


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_worker_that_is_stopped_before_it_has_joined_says_nothing_more(
    programs: Programs, sign: signal.Signals
) -> None:
    worker = programs.run("join", "http://127.0.0.1:1", "--model", f"tiny={TINY}")
    waiting = "waiting for http://127.0.0.1:1: connection refused (check the address"
    eventually(lambda: waiting in worker.errors, "it says that it waits")

    worker.process.send_signal(sign)

    assert worker.wait() == 0
    assert worker.errors.count("\n") == 1


IN_A_MOMENT = """
import sys
from shoal.cli.main import main
from shoal.cli.worker import run_worker
run_worker.GIVE_UP_AFTER = 0.5
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="pexpect needs a pty")
def test_at_a_terminal_joining_a_wrong_address_ends_with_what_was_tried(
    tmp_path: Path,
) -> None:
    import pexpect

    place = ("--data-dir", str(tmp_path), "--name", "typed")
    terminal = pexpect.spawn(
        sys.executable,
        ["-c", IN_A_MOMENT, "join", "http://127.0.0.1:1", "--trust-code", *place],
        encoding="utf-8",
        timeout=PATIENCE,
        dimensions=(24, 400),
    )

    terminal.expect_exact("waiting for http://127.0.0.1:1: connection refused")
    terminal.expect_exact(
        "shoal join: nothing answers at http://127.0.0.1:1 after 0.5 s: connection "
        "refused; check the address"
    )
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 1


def test_stopped_worker_leaves_the_pool(programs: Programs) -> None:
    pool = programs.serve()
    worker = pool.joined("one")

    assert worker.terminate() == 0

    assert worker.event("left")["reason"] == "stopped here"
    eventually(lambda: not pool.workers(), "the worker is gone")


def test_stopped_worker_finishes_its_answer(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    worker = pool.joined("one", *slow_model.flags)
    with pool.client() as client, answer_to(client, STORY) as stream:
        pieces = text_in(stream)
        first = next(pieces)

        worker.process.terminate()
        eventually(lambda: pool.workers()[0]["draining"], "it is draining")
        slow_model.go_on.set()

        assert first + "".join(pieces) == ANSWERS[STORY]
    assert worker.wait() == 0


def test_worker_can_be_stopped_while_disconnected(programs: Programs) -> None:
    pool = programs.serve()
    worker = pool.joined("one")
    pool.program.kill()
    worker.event("lost")

    assert worker.terminate() == 0


def test_killed_workers_answer_is_completed(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    workers = {name: pool.joined(name, *slow_model.flags) for name in ("one", "two")}
    with pool.client() as client, answer_to(client, STORY) as stream:
        chunks = iter(stream)
        job_id = next(chunks).id
        pieces = text_in(chunks)
        text = next(pieces)

        (busy,) = (each["id"] for each in pool.workers() if each["busy"])
        name = next(name for name in workers if name in busy)
        workers[name].kill()
        slow_model.go_on.set()
        text += "".join(pieces)

    assert text == ANSWERS[STORY]
    explanation = "\n".join(pool.admin(f"jobs/{job_id}/explain")["lines"])
    assert "worker lost" in explanation
    assert "attempt 2" in explanation


def test_jobs_of_a_killed_coordinator_all_end_once(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    worker = pool.joined("one", *slow_model.flags, "--slots", "2")
    threads = [threading.Thread(target=_ask_in_vain, args=(pool,)) for _ in range(6)]
    for each in threads:
        each.start()
    eventually(lambda: slow_model.requests == 2, "two answers have begun")
    eventually(lambda: pool.admin("status")["jobs"]["queued"] == 4, "four wait")

    pool.program.kill()
    for each in threads:
        each.join()
    worker.event("lost")
    accepted = _query(programs, "SELECT id FROM jobs")
    slow_model.go_on.set()
    pool = programs.serve(port=pool.port)
    worker.event("joined")
    jobs = [_when_ended(pool, job_id) for (job_id,) in accepted]

    assert len(jobs) == 6
    for job in jobs:
        assert (job["state"], job["error"]) == ("done", None)
        assert job["outcome"]["text"] == ANSWERS[STORY]
    assert pool.program.terminate() == 0
    assert _query(programs, "SELECT count(*) FROM ends GROUP BY job") == [(1,)] * 6


def _ask_in_vain(pool: Pool) -> None:
    """Send a request whose coordinator is killed before it answers."""
    with (
        pool.client() as client,
        pytest.raises(Exception, match=r"(?i)connection|read|chunk"),
        answer_to(client, STORY) as stream,
    ):
        "".join(text_in(stream))


def _when_ended(pool: Pool, job_id: str) -> Any:
    eventually(lambda: pool.admin(f"jobs/{job_id}")["ended_at"], "the job ends")
    return pool.admin(f"jobs/{job_id}")


def _query(programs: Programs, query: str) -> list[Any]:
    with closing(sqlite3.connect(programs.folder / "data" / "shoal.db")) as database:
        laws.prepare(database)
        return database.execute(query).fetchall()


def test_newer_of_two_workers_with_one_name_stays(programs: Programs) -> None:
    pool = programs.serve()
    older = pool.joined("one")

    newer = pool.joined("one")

    assert older.wait() == 1
    assert "--name" in older.event("left")["reason"]
    assert len(pool.workers()) == 1
    with pool.client() as client, answer_to(client, "ping") as stream:
        assert "".join(text_in(stream)) == "pong"
    assert newer.process.poll() is None


def test_worker_rejoins_a_restarted_coordinator(programs: Programs) -> None:
    pool = programs.serve()
    worker = pool.joined("one")
    assert pool.program.terminate() == 0
    worker.event("lost")

    pool = programs.serve(port=pool.port)
    worker.event("joined")

    with pool.client() as client, answer_to(client, "ping") as stream:
        assert "".join(text_in(stream)) == "pong"


def test_no_field_value_causes_a_server_error(pool: Pool) -> None:
    # Schemathesis combines them, in ``test_schema.py``.
    sound = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    refused: list[tuple[int, str, object]] = []
    with pool.client() as client:
        document: Any = client.get(f"{pool.url}/openapi.json", cast_to=object)
        schema = document["components"]["schemas"]["CreateChatCompletion"]
        for field in schema["properties"]:
            for value in ODD:
                body = sound | {"max_tokens": 1} | {field: value}
                try:
                    client.post("/chat/completions", cast_to=object, body=body)
                except openai.APIStatusError as error:
                    refused.append((error.status_code, field, value))

    assert len(refused) > len(schema["properties"])
    assert [each for each in refused if each[0] >= 500] == []


def test_disconnected_client_frees_the_worker(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    pool.joined("one", *slow_model.flags, "--slots", "1")
    with pool.client() as client, answer_to(client, STORY) as stream:
        next(text_in(stream))
        assert pool.workers()[0]["busy"] == 1

    eventually(lambda: pool.workers()[0]["busy"] == 0, "the worker is free")


def test_two_models_are_two_members_of_one_machine(programs: Programs) -> None:
    pool = programs.serve()
    flags = ("--model", f"tiny={TINY}", "--model", f"twin={TINY}")
    worker = pool.join("one", *flags)
    worker.event("joined")
    worker.event("joined")

    with pool.client() as client:
        assert sorted(model.id for model in client.models.list()) == ["tiny", "twin"]
        with answer_to(client, "ping", model="twin") as stream:
            assert "".join(text_in(stream)) == "pong"


def test_local_server_is_found(
    programs: Programs, slow_model: GatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = programs.serve()
    # The one port that can be moved: others may be in use here.
    monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{slow_model.port}")
    monkeypatch.setenv("SHOAL_URL", pool.url)
    monkeypatch.setenv("SHOAL_DATA_DIR", str(programs.folder / "worker"))
    worker = programs.run("join", "--json", "--token", TOKEN, "--model", "tiny")

    joined = worker.event("joined")

    assert joined["model"] == "tiny"
    assert joined["name"].startswith(socket.gethostname())
    slow_model.go_on.set()
    with pool.client() as client, answer_to(client, "ping") as stream:
        assert "".join(text_in(stream)) == "pong"


def test_several_engines_with_one_model_are_one_worker_with_the_slots_of_all(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    flags = (*slow_model.flags, "--engine", "embedded", "--model", f"tiny={TINY}")
    worker = pool.join("one", *flags, "--slots", "3")

    assert worker.event("joined")["slots"] == 6
    eventually(
        lambda: [each["slots"] for each in pool.workers()] == [6],
        "the coordinator has heard of both engines",
    )


def test_engines_with_one_model_are_distinct_on_separate_connections(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    flags = (*slow_model.flags, "--engine", "embedded", "--model", f"tiny={TINY}")
    worker = pool.join("one", "--wire", "grandsage", *flags)

    names = {worker.event("joined")["name"] for _ in range(2)}

    assert names == {f"one-{slow_model.port}", "one-embedded"}
    eventually(lambda: len(pool.workers()) == 2, "the coordinator knows both")


def test_dead_engine_is_withdrawn_until_it_recovers(programs: Programs) -> None:
    pool = programs.serve()
    model = GatedModel(pause=99)
    worker = pool.joined("one", *model.flags)

    model.close()
    lost = worker.event("unavailable")
    assert worker.event("left")["model"] == "tiny"
    eventually(lambda: not pool.workers(), "the coordinator knows")

    model = GatedModel(pause=99, port=model.port)
    try:
        assert worker.event("available")["engine"] == lost["engine"] == str(model.port)
        worker.event("joined")
        with pool.client() as client, answer_to(client, "ping") as stream:
            assert "".join(text_in(stream)) == "pong"
    finally:
        model.close()


def test_worker_limited_to_keys_serves_no_other(programs: Programs) -> None:
    pool = programs.serve()
    pool.joined("one", "--model", f"tiny={TINY}", "--only-for", "alice,bob")

    with (
        pool.client() as client,
        pytest.raises(openai.APIStatusError, match="work for other keys only"),
        answer_to(client, "ping"),
    ):
        pass
