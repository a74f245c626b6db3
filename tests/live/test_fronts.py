"""A coordinator whose HTTP is served by fronts, and processes of it that are killed."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from harness.postgres import postgres_server
from live.programs import (
    KEY,
    PATIENCE,
    GatedModel,
    Pool,
    Program,
    Programs,
    eventually,
)
from models.tiny_answers import ANSWERS
from shoal.app.parts import FRONT_NAME, HUB_NAME, PART, STANDBY_NAME

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="finds processes in /proc"
)

STORY = "Tell me a story."
USER = [{"role": "user", "content": STORY}]


def chat_text(lines: Iterator[str]) -> Iterator[str]:
    for event in events(lines):
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


def responses_text(lines: Iterator[str]) -> Iterator[str]:
    for event in events(lines):
        if event["type"] == "response.output_text.delta":
            yield event["delta"]


def messages_text(lines: Iterator[str]) -> Iterator[str]:
    for event in events(lines):
        if event["type"] == "content_block_delta":
            yield event["delta"]["text"]


def ollama_chat_text(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        yield json.loads(line)["message"]["content"]


def events(lines: Iterator[str]) -> Iterator[Any]:
    """Yield the events of a stream, which must end as a whole one does."""
    for line in lines:
        kind, _, data = line.partition(": ")
        if kind == "event":
            assert data != "error"
        if kind == "data" and data != "[DONE]":
            event = json.loads(data)
            assert "error" not in event or event["error"] is None, event
            yield event


STREAMS: Mapping[str, tuple[str, Any, Callable[[Iterator[str]], Iterator[str]]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": USER, "temperature": 0},
        chat_text,
    ),
    "responses": ("/v1/responses", {"input": STORY, "temperature": 0}, responses_text),
    "messages": (
        "/v1/messages",
        {"messages": USER, "max_tokens": 500, "temperature": 0},
        messages_text,
    ),
    "ollama": (
        "/ollama/api/chat",
        {"messages": USER, "options": {"temperature": 0}},
        ollama_chat_text,
    ),
}


class Fronts:
    """A coordinator with fronts, and its processes."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def pids(self, name: str) -> list[int]:
        """Return the processes of this name, which they have once they have begun."""
        parent = self.pool.program.process.pid
        found = []
        for folder in Path("/proc").iterdir():
            try:
                status = (folder / "status").read_text()
            except OSError:
                continue
            if (
                status.startswith(f"Name:\t{name}\n")
                and f"\nPPid:\t{parent}\n" in status
            ):
                found.append(int(folder.name))
        return found

    def kill_hub(self, number: int = signal.SIGKILL) -> None:
        """End the hub, and wait for the next one."""
        (hub,) = self.pids(HUB_NAME)
        os.kill(hub, number)
        eventually(lambda: hub not in self.pids(HUB_NAME), "the hub is gone")
        eventually(lambda: self.pids(HUB_NAME), "another hub")

    def standby(self) -> int:
        """Wait for the standby; return its process."""
        eventually(lambda: self.pids(STANDBY_NAME), "a standby")
        (standby,) = self.pids(STANDBY_NAME)
        return standby

    def ask(self, path: str, body: Any = None, key: str = KEY) -> Any:
        """Return the JSON of an answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = Request(self.pool.url + path, data, headers)
        with urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    def refusal(self, path: str, body: Any = None, key: str = KEY) -> int:
        """Return the status of a request that is refused."""
        with pytest.raises(HTTPError) as refused:
            self.ask(path, body, key)
        refused.value.close()
        return refused.value.code


@pytest.fixture
def fronts(programs: Programs) -> Fronts:
    return Fronts(programs.serve("--fronts", "2"))


class Reading:
    """A stream that is read in a thread."""

    def __init__(self, fronts: Fronts, dialect: str) -> None:
        self.text = ""
        self.error: Exception | None = None
        path, body, texts = STREAMS[dialect]
        body = {"model": "tiny", "stream": True, **body}

        def read() -> None:
            try:
                with fronts.pool.posting(path, body) as lines:
                    for text in texts(line for line in lines if line):
                        self.text += text
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=read)
        self.thread.start()

    def end(self) -> str:
        """Wait for the end; return the whole text."""
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        assert self.error is None, self.error
        return self.text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_streams_outlive_their_hub(
    fronts: Fronts, number: int, programs: Programs, slow_model: GatedModel
) -> None:
    """Whether it is killed, or replaced by an upgrade."""
    workers = [fronts.pool.joined(name, *slow_model.flags) for name in ("one", "two")]
    readings = [Reading(fronts, dialect) for dialect in STREAMS]
    eventually(lambda: all(each.text for each in readings), "each has begun")

    if number == signal.SIGHUP:
        (hub,) = fronts.pids(HUB_NAME)
        fronts.pool.program.process.send_signal(number)
        eventually(lambda: hub not in fronts.pids(HUB_NAME), "the hub is gone")
        eventually(lambda: fronts.pids(HUB_NAME), "another hub")
    else:
        fronts.kill_hub()
    slow_model.go_on.set()

    assert [each.end() for each in readings] == [ANSWERS[STORY]] * len(readings)
    whole = fronts.ask(
        "/v1/chat/completions", {"model": "tiny", "messages": USER, "temperature": 0}
    )
    assert whole["choices"][0]["message"]["content"] == ANSWERS[STORY]
    # Their connections were only cut: no front wrote anything of its own into them.
    reasons = [str(worker.event("lost")) for worker in workers]
    assert not [each for each in reasons if "broken" in each]
    assert "Traceback" not in fronts.pool.program.errors


LOGGED = ("--log-level", "info")


def has_text_link(worker: Program) -> bool:
    return "text link open" in worker.errors


def test_text_goes_on_while_the_hub_is_stopped(
    fronts: Fronts, slow_model: GatedModel
) -> None:
    """It goes from the worker to the front, and its end when the hub goes on."""
    worker = fronts.pool.joined("one", *slow_model.flags, *LOGGED)
    readings = [Reading(fronts, dialect) for dialect in STREAMS]
    eventually(lambda: all(each.text for each in readings), "each has begun")
    eventually(lambda: has_text_link(worker), "the text link is open")

    (hub,) = fronts.pids(HUB_NAME)
    os.kill(hub, signal.SIGSTOP)
    try:
        slow_model.go_on.set()
        eventually(
            lambda: [each.text for each in readings] == [ANSWERS[STORY]] * 4,
            "all the text",
        )
        assert all(each.thread.is_alive() for each in readings)
    finally:
        os.kill(hub, signal.SIGCONT)

    assert [each.end() for each in readings] == [ANSWERS[STORY]] * len(readings)


@pytest.mark.parametrize("lost", ["worker", "fronts"])
def test_what_was_lost_on_the_way_past_the_hub_comes_after_all(
    fronts: Fronts, lost: str, programs: Programs
) -> None:
    """A successor goes on after what the client has, of which the hub has less."""
    model = GatedModel(80, pace=0.1)  # so that the copies are behind
    try:
        workers = [fronts.pool.joined("one", *model.flags, *LOGGED)]
        readings = [Reading(fronts, "chat") for _ in range(4)]
        eventually(lambda: all(each.text for each in readings), "each has begun")
        eventually(lambda: has_text_link(workers[0]), "the text link is open")
        workers.append(fronts.pool.joined("two", *model.flags))
        begun = [len(each.text) for each in readings]
        eventually(
            lambda: all(
                len(each.text) > size
                for each, size in zip(readings, begun, strict=True)
            ),
            "each goes on",
        )
        if lost == "worker":
            workers[0].kill()
            model.go_on.set()
            assert [each.end() for each in readings] == [ANSWERS[STORY]] * 4
        else:
            # Its clients are cut off, and the others lose what it was to pass on.
            os.kill(fronts.pids(FRONT_NAME)[0], signal.SIGKILL)
            model.go_on.set()
            for each in readings:
                each.thread.join(PATIENCE)
                assert not each.thread.is_alive()
            assert all(ANSWERS[STORY].startswith(each.text) for each in readings)
    finally:
        model.close()
    assert "Traceback" not in fronts.pool.program.errors


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def store(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    """The flags of a store."""
    if request.param == "SQLite":
        yield ()
        return
    with postgres_server() as server:
        yield "--store", server.url()


def test_a_standby_takes_over_each_time(
    store: tuple[str, ...], programs: Programs, slow_model: GatedModel
) -> None:
    fronts = Fronts(programs.serve("--fronts", "1", *store))
    fronts.pool.joined("one", *slow_model.flags)
    reading = Reading(fronts, "chat")
    eventually(lambda: reading.text, "it has begun")

    for _ in range(2):
        standby = fronts.standby()
        opened = {os.readlink(each) for each in Path(f"/proc/{standby}/fd").iterdir()}
        assert len([each for each in opened if each.startswith("socket:")]) == 1
        assert not [each for each in opened if str(programs.data) in each]
        fronts.kill_hub()
        assert fronts.pids(HUB_NAME) == [standby]
    slow_model.go_on.set()

    assert reading.end() == ANSWERS[STORY]
    assert slow_model.requests in (1, 2)  # one: the worker came back in time
    assert "standby" not in fronts.pool.program.errors


def test_a_lost_standby_is_replaced(fronts: Fronts) -> None:
    hub = fronts.pids(HUB_NAME)
    lost = fronts.standby()

    os.kill(lost, signal.SIGKILL)

    eventually(lambda: {*fronts.pids(STANDBY_NAME)} - {lost}, "another standby")
    assert fronts.pids(HUB_NAME) == hub
    errors = fronts.pool.program.errors
    assert errors.count("the standby ended status=-9; starting another") == 1


def test_an_upgrade_starts_the_code_that_is_there(programs: Programs) -> None:
    """If that does not start, the hub stays."""
    settings = programs.folder / "shoal.toml"
    settings.write_text("")
    fronts = Fronts(programs.serve("--fronts", "1", "--config", str(settings)))
    (hub,), standby = fronts.pids(HUB_NAME), fronts.standby()
    first = fronts.pool.program.process

    settings.write_text("no TOML")
    first.send_signal(signal.SIGHUP)
    eventually(lambda: "the hub stays" in fronts.pool.program.errors, "it is refused")
    assert fronts.pids(HUB_NAME) == [hub]
    assert standby not in fronts.pids(STANDBY_NAME)

    settings.write_text("")
    standby = fronts.standby()
    first.send_signal(signal.SIGHUP)
    eventually(lambda: {*fronts.pids(HUB_NAME)} - {hub}, "another hub")
    assert fronts.pids(HUB_NAME) != [standby]
    fronts.pool.joined("one")
    assert chat_with(KEY, fronts) == ANSWERS["ping"]
    assert "waiting for open jobs" not in fronts.pool.program.errors


def chat_with(key: str, fronts: Fronts) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ping"}]}
    answer = fronts.ask("/v1/chat/completions", body, key)
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_a_revoked_key_is_refused_by_all_fronts(fronts: Fronts) -> None:
    fronts.pool.joined("one")
    created = fronts.ask("/admin/keys", {"name": "guest"})
    tries = range(8)  # connections, which the fronts share
    assert {chat_with(created["key"], fronts) for _ in tries} == {ANSWERS["ping"]}

    request = Request(
        f"{fronts.pool.url}/admin/keys/guest",
        headers={"Authorization": f"Bearer {KEY}"},
        method="DELETE",
    )
    urlopen(request, timeout=PATIENCE).close()

    body = {"model": "tiny", "messages": USER}
    refused = {
        fronts.refusal("/v1/chat/completions", body, created["key"]) for _ in tries
    }
    assert refused == {401}
    assert chat_with(KEY, fronts) == ANSWERS["ping"]


def test_clients_of_a_lost_front_have_left(
    fronts: Fronts, slow_model: GatedModel
) -> None:
    fronts.pool.joined("one", *slow_model.flags)
    reading = Reading(fronts, "chat")
    eventually(lambda: reading.text, "it has begun")

    eventually(lambda: len(fronts.pids(FRONT_NAME)) == 2, "both fronts")
    lost = fronts.pids(FRONT_NAME)
    for front in lost:
        os.kill(front, signal.SIGKILL)
    eventually(lambda: len({*fronts.pids(FRONT_NAME)} - {*lost}) == 2, "two others")

    reading.thread.join(PATIENCE)
    assert reading.text != ANSWERS[STORY]  # not a whole stream
    eventually(
        lambda: (
            [each["state"] for each in fronts.ask("/admin/jobs")["data"]]
            == ["cancelled"]
        ),
        "the job is cancelled",
    )


def test_without_a_hub_new_work_is_refused_with_the_reason(fronts: Fronts) -> None:
    fronts.pool.joined("one")
    parent, (hub,) = fronts.pool.program.process, fronts.pids(HUB_NAME)
    parent.send_signal(signal.SIGSTOP)  # it starts no other one
    os.kill(hub, signal.SIGKILL)

    body = {"model": "tiny", "messages": USER}
    for path in ("/v1/chat/completions", "/v1/jobs/commit/fast"):
        with pytest.raises(HTTPError) as refused:
            fronts.ask(path, body)
        assert refused.value.code == 503
        assert refused.value.headers["Retry-After"]
        assert "the coordinator is restarting" in refused.value.read().decode()

    parent.send_signal(signal.SIGCONT)
    eventually(lambda: {*fronts.pids(HUB_NAME)} - {hub}, "another hub")
    fronts.pool.joined("two")
    assert chat_with(KEY, fronts) == ANSWERS["ping"]


def test_a_stop_ends_all_processes(fronts: Fronts) -> None:
    eventually(lambda: len(fronts.pids(FRONT_NAME)) == 2, "both fronts")
    others = [*fronts.pids(HUB_NAME), *fronts.pids(FRONT_NAME), fronts.standby()]

    assert fronts.pool.program.terminate() == 0

    eventually(
        lambda: not any(Path(f"/proc/{each}").exists() for each in others), "their end"
    )
    assert "lost the hub" not in fronts.pool.program.errors
    assert "standby" not in fronts.pool.program.errors


def test_answers_end_before_a_stop_that_all_processes_are_asked_for(
    fronts: Fronts, slow_model: GatedModel
) -> None:
    """As by ``systemctl kill``."""
    fronts.pool.joined("one", *slow_model.flags)
    reading = Reading(fronts, "chat")
    eventually(lambda: reading.text, "it has begun")
    eventually(lambda: len(fronts.pids(FRONT_NAME)) == 2, "both fronts")

    for each in (*fronts.pids(HUB_NAME), *fronts.pids(FRONT_NAME), fronts.standby()):
        os.kill(each, signal.SIGTERM)
    fronts.pool.program.process.send_signal(signal.SIGTERM)
    eventually(lambda: "stopping" in fronts.pool.program.errors, "it stops")
    slow_model.go_on.set()

    assert reading.end() == ANSWERS[STORY]
    assert fronts.pool.program.wait() == 0
    assert "standby" not in fronts.pool.program.errors


def test_all_processes_end_with_the_first(fronts: Fronts) -> None:
    """Also if it is killed; and their sockets are removed."""
    eventually(lambda: len(fronts.pids(FRONT_NAME)) == 2, "both fronts")
    others = [*fronts.pids(HUB_NAME), *fronts.pids(FRONT_NAME), fronts.standby()]
    environment = Path(f"/proc/{others[0]}/environ").read_bytes().split(b"\0")
    (part,) = (each for each in environment if each.startswith(PART.encode()))
    folder = Path(json.loads(part.partition(b"=")[2])["folder"])
    assert folder.exists()

    fronts.pool.program.kill()

    eventually(
        lambda: not any(Path(f"/proc/{each}").exists() for each in others), "their end"
    )
    assert not folder.exists()


def test_a_stop_while_the_hub_is_gone_starts_no_other(fronts: Fronts) -> None:
    for _ in range(2):  # so that there is a pause before the next one
        fronts.kill_hub()
    (hub,) = fronts.pids(HUB_NAME)
    os.kill(hub, signal.SIGKILL)
    eventually(lambda: hub not in fronts.pids(HUB_NAME), "the hub is gone")

    fronts.pool.program.terminate()  # ends

    eventually(lambda: not fronts.pids(HUB_NAME), "there is no hub")
