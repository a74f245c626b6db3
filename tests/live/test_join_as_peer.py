"""``shoal join`` by the wire on which one connection stands for all models.

On the local network directly, through the coordinator's relay, and as a peer of peers.
"""

import socket
from collections.abc import Mapping
from typing import Any

import pytest

from live.programs import (
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
ONE_MODEL = ("--model", f"tiny={TINY}")
TINY_MODEL = (*ONE_MODEL, "--wire", "tealenet")
TWO_MODELS = (*TINY_MODEL, "--model", f"twin={TINY}")


def ids(pool: Pool) -> list[str]:
    return sorted(each["id"] for each in pool.workers())


def direct(pool: Pool) -> Mapping[str, Any]:
    """Return the coordinator's ports without HTTP."""
    with pool.client() as client:
        health: Any = client.get(f"{pool.url}/healthz", cast_to=object)
    ports: Mapping[str, Any] = health["direct"].get("tealenet", {})
    return ports


def protection(pool: Pool) -> str:
    """Return the protection of the only worker's connection."""
    (worker,) = pool.workers()
    said: str = worker["protection"]
    return said


def another_port(port: int) -> int:
    """Return a port that is free, and not this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        found: int = free.getsockname()[1]
    assert found != port
    return found


def answers(pool: Pool, question: str = "ping", model: str = "tiny") -> bool:
    with pool.client() as client, answer_to(client, question, model) as stream:
        return "".join(text_in(stream)) == ANSWERS[question]


def test_all_models_join_and_leave_with_one_connection(programs: Programs) -> None:
    pool = programs.serve()
    worker = pool.join("one", *ONE_MODEL, "--model", f"twin={TINY}")
    said = [worker.event("joined")["model"] for _ in range(2)]

    assert said == ["tiny", "twin"]
    both = ["shoal:one/tiny", "shoal:one/twin"]
    eventually(lambda: ids(pool) == both, "it joined with each model")
    assert answers(pool, STORY, "tiny")
    assert answers(pool, STORY, "twin")

    assert worker.terminate() == 0
    eventually(lambda: not pool.workers(), "both models are gone")


def test_dead_engine_withdraws_only_its_model(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    slow_model.go_on.set()
    flags = (*slow_model.flags, "--engine", "embedded", "--model", "tiny")
    worker = pool.join("one", *flags, "--model", f"twin={TINY}")
    for _ in range(2):
        worker.event("joined")

    slow_model.close()
    assert worker.event("left")["model"] == "tiny"
    eventually(lambda: ids(pool) == ["shoal:one/twin"], "the coordinator knows")

    assert answers(pool, model="twin")


def test_worker_reconnects_directly_to_a_changed_port(
    programs: Programs,
) -> None:
    pool = programs.serve()
    worker = pool.joined("one", *TINY_MODEL)
    assert protection(pool) == "noise"
    before = direct(pool)["tcp"]
    pool.program.kill()
    worker.event("lost")

    pool = programs.serve("--tealenet-port", str(another_port(before)), port=pool.port)
    worker.event("joined")

    assert direct(pool)["tcp"] != before
    eventually(lambda: pool.workers(), "it is back")
    assert protection(pool) == "noise"
    assert answers(pool)


def test_worker_started_before_its_coordinator_joins_directly(
    programs: Programs,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    worker = programs.run(
        *("join", f"http://127.0.0.1:{port}", "--json", "--name", "one"),
        *("--token", TOKEN, *TWO_MODELS),
    )
    assert "connection refused" in worker.event("waiting")["reason"]

    pool = programs.serve(port=port)
    worker.event("joined")

    both = ["tealenet:one/tiny", "tealenet:one/twin"]
    eventually(lambda: ids(pool) == both, "it joined with each model")
    assert {each["protection"] for each in pool.workers()} == {"noise"}
    assert answers(pool)


def test_worker_joins_through_the_relay_without_a_direct_port(
    programs: Programs,
) -> None:
    pool = programs.serve("--no-tealenet-lan")
    pool.joined("one", *TINY_MODEL)

    assert not direct(pool)
    assert ids(pool) == ["tealenet:one/tiny"]
    assert protection(pool) == "noise"
    assert answers(pool, STORY)


def test_relay_worker_rejoins_a_restarted_coordinator(
    programs: Programs,
) -> None:
    pool = programs.serve("--no-tealenet-lan")
    worker = pool.joined("one", *TINY_MODEL)
    pool.program.kill()
    worker.event("lost")

    pool = programs.serve("--no-tealenet-lan", port=pool.port)
    worker.event("joined")

    assert answers(pool)


def test_worker_joins_at_a_tcp_address(
    programs: Programs,
) -> None:
    pool = programs.serve()
    address = f"tcp://127.0.0.1:{direct(pool)['tcp']}"
    worker = programs.run(
        "join", address, "--json", "--name", "one", "--token", TOKEN, *TINY_MODEL
    )

    assert worker.event("joined")["url"] == address
    assert ids(pool) == ["tealenet:one/tiny"]
    assert answers(pool)


def test_worker_joins_as_a_node_of_a_relay(programs: Programs) -> None:
    pool = programs.serve()
    relay = f"{pool.url.replace('http', 'ws', 1)}/ws"
    worker = programs.run(
        *("join", relay, "--wire", "tealenet", "--json", "--name", "one"),
        *("--token", TOKEN, *TINY_MODEL),
    )

    worker.event("joined")
    eventually(lambda: ids(pool) == ["tealenet:one/tiny"], "it was met")
    assert answers(pool, STORY)


@pytest.mark.parametrize("lan", ["--tealenet-lan", "--no-tealenet-lan"])
def test_worker_is_admitted_by_the_cluster_passcode(
    programs: Programs, lan: str
) -> None:
    pool = programs.serve("--tealenet-passcode", "wildlife", lan)
    worker = programs.run(
        *("join", pool.url, "--json", "--name", "one", "--passcode", "wildlife"),
        *TINY_MODEL,
    )

    worker.event("joined")
    eventually(lambda: ids(pool) == ["tealenet:one/tiny"], "it was met")
    assert answers(pool)


def test_wrong_passcode_ends_the_worker_with_a_hint(programs: Programs) -> None:
    pool = programs.serve("--tealenet-passcode", "wildlife")
    worker = programs.run(
        *("join", pool.url, "--json", "--name", "one", "--passcode", "zoo"),
        *TINY_MODEL,
    )

    refused = worker.event("refused")

    assert worker.wait() == 1
    assert "--passcode" in refused["reason"] or "--token" in refused["reason"]
