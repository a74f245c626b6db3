"""Several coordinators that share a database: one has the pool, the others stand by."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from ssl import create_default_context
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import shoal
from harness.postgres import PostgresServer, postgres_server
from live.machines import two_machines
from live.programs import (
    KEY,
    PATIENCE,
    TESTS,
    TINY,
    GatedModel,
    Pool,
    Program,
    Programs,
    eventually,
    family,
    suspended,
)
from live.test_calls_survive import CODE, FLAGS, LONG, begun, marked
from live.test_fronts import LOGGED, STREAMS, Fronts, Reading, chat_with
from models.tiny_answers import ANSWERS
from shoal.app.parts import HUB_NAME, LOOK_EVERY, SILENT_LOOKS

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="finds processes in /proc"
)

STORY = "Tell me a story."


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


class Nodes:
    """Nodes of one pool; the first has it at the beginning."""

    def __init__(self, folder: Path, server: PostgresServer) -> None:
        self._folder = folder
        self._server = server
        self._programs: list[Programs] = []

    def alone(self) -> None:
        """Start a coordinator that is no node."""
        self.start(alone=True).event("ready")

    def start(
        self, *flags: str, alone: bool = False, url: str = "", host: str = ""
    ) -> Program:
        """Start a node on an address of its own, as a machine has."""
        number = len(self._programs) + 1
        folder = self._folder / f"node{number}"
        folder.mkdir()
        programs = Programs(folder)
        self._programs.append(programs)
        if alone:
            return programs.start("--store", self._server.url())
        host = host or f"127.0.0.{number}"
        return programs.start(
            *("--store", url or self._server.url(), "--fronts", "1", "--host", host),
            *("--node", f"{host}:0", "--no-discovery", *flags),
        )

    def first(self, *flags: str, url: str = "", host: str = "") -> Fronts:
        """Start the node that has the pool."""
        program = self.start(*flags, url=url, host=host)
        return Fronts(Pool(self._programs[-1], program, program.event("ready")))

    def standby(self, *flags: str, url: str = "", host: str = "") -> Fronts:
        """Start a node that stands by."""
        program = self.start(*flags, url=url, host=host)
        return self._standing_by(self._programs[-1], program)

    def standbys(self, count: int, *flags: str) -> list[Fronts]:
        """Start nodes that stand by, all at once."""
        started = [self.start(*flags) for _ in range(count)]
        pairs = zip(self._programs[-count:], started, strict=True)
        return [self._standing_by(*each) for each in pairs]

    @staticmethod
    def _standing_by(programs: Programs, program: Program) -> Fronts:
        event = program.event("standby")
        port = int(event["url"].rpartition(":")[2])
        ready = {"url": event["url"], "ports": {"http": port}}
        return Fronts(Pool(programs, program, ready))

    def data(self, number: int) -> Path:
        return self._programs[number].data

    def close(self) -> None:
        for programs in self._programs:
            programs.close()


@pytest.fixture
def nodes(tmp_path: Path, server: PostgresServer) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, server)
    try:
        yield nodes
    finally:
        nodes.close()


def lose_power(node: Fronts) -> None:
    """End all processes of a node at once."""
    parent = node.pool.program.process.pid
    os.kill(parent, signal.SIGSTOP)  # it starts no other
    for name in (HUB_NAME, "shoal-standby", "shoal-front"):
        for pid in node.pids(name):
            os.kill(pid, signal.SIGKILL)
    node.pool.program.kill()


def pause_hub(node: Fronts) -> None:
    """Stop the hub; the first process of its node replaces it."""
    (hub,) = node.pids(HUB_NAME)
    os.kill(hub, signal.SIGSTOP)
    eventually(lambda: hub not in node.pids(HUB_NAME), "it is killed")


def test_text_goes_to_the_node_with_the_client(
    nodes: Nodes, slow_model: GatedModel
) -> None:
    first = nodes.first()
    second, third = nodes.standby(), nodes.standby()
    worker = second.pool.joined("one", *slow_model.flags, *LOGGED)
    reading = Reading(third, "chat")
    eventually(lambda: reading.text, "it has begun")

    address = third.pool.url.removeprefix("http://")
    opened = f"text link open url=noise+ws://{address}/"
    eventually(lambda: opened in worker.errors, "the text link is open")
    slow_model.go_on.set()

    assert reading.end() == ANSWERS[STORY]
    assert "Traceback" not in first.pool.program.errors


@pytest.mark.parametrize("lose", [lose_power, pause_hub])
def test_streams_at_other_nodes_outlive_the_one_that_has_the_pool(
    nodes: Nodes, slow_model: GatedModel, lose: Callable[[Fronts], None]
) -> None:
    first = nodes.first()
    second, third = nodes.standby(), nodes.standby()
    # Workers may come to any node.
    second.pool.joined("one", *slow_model.flags)
    third.pool.joined("two", *slow_model.flags)
    readings = [Reading(second, each) for each in STREAMS]
    readings += [Reading(third, each) for each in STREAMS]
    eventually(lambda: all(each.text for each in readings), "each has begun")

    lose(first)
    slow_model.go_on.set()

    assert [each.end() for each in readings] == [ANSWERS[STORY]] * len(readings)
    for node in (second, third):
        assert chat_with(KEY, node) == ANSWERS["ping"]
        assert "Traceback" not in node.pool.program.errors


def test_streams_outlive_the_process_that_connects_their_node(
    nodes: Nodes, slow_model: GatedModel
) -> None:
    first, second = nodes.first(), nodes.standby()
    first.pool.joined("one", *slow_model.flags)
    readings = [Reading(second, each) for each in STREAMS]
    eventually(lambda: all(each.text for each in readings), "each has begun")

    (standing_by,) = second.pids(HUB_NAME)
    os.kill(standing_by, signal.SIGKILL)
    eventually(lambda: {*second.pids(HUB_NAME)} - {standing_by}, "another process")
    slow_model.go_on.set()

    assert [each.end() for each in readings] == [ANSWERS[STORY]] * len(readings)
    assert slow_model.requests == len(readings)


def test_a_worker_of_a_lost_node_goes_on_at_another(
    nodes: Nodes, slow_model: GatedModel
) -> None:
    first, second = nodes.first(), nodes.standby()
    eventually(lambda: len(join_urls(first)) > 1, "the first knows the other")
    worker = first.pool.joined("one", *slow_model.flags)
    reading = Reading(second, "chat")
    eventually(lambda: reading.text, "it has begun")

    lose_power(first)
    lost = worker.event("lost")
    assert second.pool.url.removeprefix("http://") in str(lost["reason"])
    worker.event("joined")
    slow_model.go_on.set()

    assert reading.end() == ANSWERS[STORY]
    assert slow_model.requests in (1, 2)  # one: it came back in time
    assert chat_with(KEY, second) == ANSWERS["ping"]


def test_a_call_that_runs_while_its_node_is_lost_runs_once(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    first, second = nodes.first(*FLAGS), nodes.standby(*FLAGS)
    eventually(lambda: len(join_urls(first)) > 1, "the first knows the other")
    worker = first.pool.join("one", *CODE, token=LONG)
    worker.event("joined")
    folder, go_on = tmp_path / "marks", tmp_path / "go on"
    folder.mkdir()
    with shoal.Pool(second.pool.url, KEY) as pool:
        call = pool.submit(marked, str(folder), 7, 0.0, str(go_on))
        eventually(call.running, "it is stored that the worker has it")

        lose_power(first)
        worker.event("lost")
        worker.event("joined")
        go_on.touch()

        assert call.result(PATIENCE) == 49
    assert [len(times) for times in begun(folder).values()] == [1]


def join_urls(node: Fronts) -> Sequence[str]:
    """Return the URLs that a node names in its invitations."""
    found: Sequence[str] = node.ask("/admin/join")["urls"]
    return found


def test_a_node_that_stops_breaks_no_stream(
    nodes: Nodes, slow_model: GatedModel
) -> None:
    """Neither the one that has the pool, nor one that stands by."""
    first, second, third = nodes.first(), nodes.standby(), nodes.standby()
    second.pool.joined("one", *slow_model.flags)
    readings = [Reading(each, "chat") for each in (first, second, third)]
    eventually(lambda: all(each.text for each in readings), "each has begun")

    third.pool.program.process.send_signal(signal.SIGTERM)
    first.pool.program.process.send_signal(signal.SIGTERM)
    eventually(lambda: ready(second) == 200, "another has the pool")
    slow_model.go_on.set()

    assert [each.end() for each in readings] == [ANSWERS[STORY]] * 3
    assert first.pool.program.wait() == 0
    assert third.pool.program.wait() == 0
    assert chat_with(KEY, second) == ANSWERS["ping"]


def test_nodes_have_one_identity(nodes: Nodes) -> None:
    """Also with TLS, whose key a client knows by its fingerprint."""
    first = nodes.first("--tls", "auto")
    second = nodes.standby("--tls", "auto")
    folders = [nodes.data(number) for number in (0, 1)]

    for name in ("api-key", "signing-key", "tls/authority.pem", "tls/server-key.pem"):
        assert len({(folder / name).read_text() for folder in folders}) == 1

    lose_power(first)
    _, _, token = first.pool.ready["join"].partition("--token ")
    worker = second.pool.join("one", "--model", f"tiny={TINY}", token=token)
    worker.event("joined")
    trusting = create_default_context(cafile=folders[1] / "tls" / "authority.pem")
    models = Request(
        f"{second.pool.url}/v1/models", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urlopen(models, context=trusting) as answer:
        assert [each["id"] for each in json.loads(answer.read())["data"]] == ["tiny"]


def test_a_node_does_not_stand_by_for_a_coordinator_alone(nodes: Nodes) -> None:
    nodes.alone()

    second = nodes.start()

    assert second.wait() == 1
    assert "start it with --node, too" in second.errors


def test_a_node_that_is_cut_off_is_replaced_and_stands_by(
    tmp_path: Path, slow_model: GatedModel
) -> None:
    """The database, the other node and all clients are at the other end of a cable."""
    with two_machines() as (one, other), ExitStack() as ending:
        with other.inside():
            server = ending.enter_context(postgres_server("listen_addresses=*"))
            server.admit(f"{one.address}/32")
            model = GatedModel(1)  # the first piece, until it may go on
            ending.callback(model.close)
        nodes = Nodes(tmp_path, server)
        ending.callback(nodes.close)
        with one.inside():
            url = server.url().replace("127.0.0.1", other.address)
            first = nodes.first(url=url, host=one.address)
        with other.inside():
            second = nodes.standby(host=other.address)
            second.pool.joined("one", *model.flags)
            reading = Reading(second, "chat")
            eventually(lambda: reading.text, "it has begun")

            one.ip("link", "set", one.cable, "down")
            eventually(
                lambda: "is silent: taking over" in second.pool.program.errors,
                "the other takes over",
            )
            eventually(lambda: ready(second) == 200, "it has the pool")
            model.go_on.set()
            assert reading.end() == ANSWERS[STORY]

        one.ip("link", "set", one.cable, "up")
        eventually(
            lambda: "has taken over" in first.pool.program.errors, "it stands by"
        )
        with one.inside():
            eventually(lambda: chat_with(KEY, first) == ANSWERS["ping"], "it serves")


def test_nobody_takes_over_while_the_database_is_away(
    nodes: Nodes, server: PostgresServer, slow_model: GatedModel
) -> None:
    first, second = nodes.first(), nodes.standby()
    first.pool.joined("one", *slow_model.flags)
    (hub,) = first.pids(HUB_NAME)
    reading = Reading(second, "chat")
    eventually(lambda: reading.text, "it has begun")

    server.kill()
    eventually(lambda: ready(second) == 503, "it is away")
    slow_model.go_on.set()
    eventually(lambda: "standing by without" in second.pool.program.errors, "noticed")
    server.start()

    assert reading.end() == ANSWERS[STORY]
    assert chat_with(KEY, second) == ANSWERS["ping"]
    eventually(lambda: ready(second) == 200, "it has healed")
    assert first.pids(HUB_NAME) == [hub]
    assert second.pool.program.process.poll() is None
    assert "has taken over" not in first.pool.program.errors


def test_a_node_stands_by_while_the_database_is_stopped(
    nodes: Nodes, server: PostgresServer, slow_model: GatedModel
) -> None:
    first, second = nodes.first(), nodes.standby()
    first.pool.joined("one", *slow_model.flags)
    (standing_by,) = second.pids(HUB_NAME)
    reading = Reading(second, "chat")
    eventually(lambda: reading.text, "it has begun")

    with suspended(family(server.pid)):
        time.sleep(2 * SILENT_LOOKS * LOOK_EVERY)
    slow_model.go_on.set()

    assert reading.end() == ANSWERS[STORY]
    assert second.pids(HUB_NAME) == [standing_by]


def test_no_node_goes_on_with_an_older_copy_of_the_database(
    nodes: Nodes, server: PostgresServer
) -> None:
    """As after a failover to a replica that lacks the last commits."""
    first, second = nodes.first(), nodes.standby()
    first.pool.joined("one")
    copy = server.data.with_name("copy")
    server.stop()
    subprocess.run(["cp", "-a", server.data, copy], check=True)
    server.start()
    eventually(lambda: ready(second) == 200, "it has healed")
    assert chat_with(KEY, second) == ANSWERS["ping"]

    server.kill()
    shutil.rmtree(server.data)
    copy.rename(server.data)
    server.start()

    def has_ended() -> bool:
        with suppress(OSError):
            chat_with(KEY, first)  # which it writes
        return first.pool.program.process.poll() is not None

    eventually(has_ended, "the node that has the pool ends")
    for each in (first, second):
        assert each.pool.program.wait() == 74
        assert "the database went back" in each.pool.program.errors
    assert ready(nodes.first("--new-log")) == 200
    assert ready(nodes.standby()) == 200


def can_mount() -> bool:
    asked = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(asked, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs to mount")
def test_nobody_takes_over_while_the_disk_of_the_database_is_full(
    nodes: Nodes, server: PostgresServer, slow_model: GatedModel
) -> None:
    with server.disk(32 << 20) as disk:
        first, second = nodes.first(url=disk.url), nodes.standby(url=disk.url)
        first.pool.joined("one", *slow_model.flags)
        (hub,) = first.pids(HUB_NAME)
        reading = Reading(second, "chat")
        eventually(lambda: reading.text, "it has begun")

        disk.fill()
        # More than fits into free pages of the database.
        long = [{"role": "user", "content": Random(1).randbytes(30_000).hex()}]
        with pytest.raises(HTTPError) as refused:
            second.ask("/v1/chat/completions", {"model": "tiny", "messages": long})
        assert refused.value.code == 503
        assert "No space left on device" in refused.value.read().decode()
        assert ready(second) == 503
        slow_model.go_on.set()
        eventually(lambda: reading.text == ANSWERS[STORY], "the stream goes on")
        disk.free()

        assert reading.end() == ANSWERS[STORY]
        assert chat_with(KEY, second) == ANSWERS["ping"]
        assert first.pids(HUB_NAME) == [hub]
        log = first.pool.program.errors
        assert log.count("store failing") == log.count("store healed") == 1
        nodes.close()  # before the disk is gone


def ready(node: Fronts) -> int:
    try:
        with urlopen(f"{node.pool.url}/readyz") as answer:
            status: int = answer.status
            return status
    except HTTPError as error:
        return error.code
