"""Two machines on one cable discover each other and share models."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.slow_imports import openai
from harness.speed import scaled
from live.machines import two_machines
from live.programs import (
    TINY,
    eventually,
)
from live.sites import Site, check_takeover, with_model
from models.tiny_answers import ANSWERS
from transports.certificates import issue

TASKS = Path(__file__).parents[1] / "tasks" / "demo_tasks.py"
STORY = "Tell me a story."
EVERYWHERE = ("--host", "0.0.0.0", "--log-level", "info")
REEF = "c7d1f0a85e3b42966ab1"
LOOKING = (*EVERYWHERE, "--tealenet-browse", "--tealenet-passcode", REEF)
FLEET_TOKEN = "5d0e93b7a1c84f26d9e1"
PORT = 4321  # of a machine's own, so that nobody else has it


@pytest.fixture
def places(tmp_path: Path) -> Iterator[tuple[Site, Site]]:
    with two_machines() as machines:
        one, other = (Site(machine, tmp_path) for machine in machines)
        try:
            yield one, other
        finally:
            one.programs.close()
            other.programs.close()


def test_machines_discover_each_other_and_share_models(
    places: tuple[Site, Site],
) -> None:
    one, other = places
    here, there = one.serve(*LOOKING), other.serve(*LOOKING)
    assert here.url == f"http://{one.machine.address}:{here.port}"
    with_model(one, here, "tiny")
    with_model(other, there, "twin")

    eventually(lambda: one.models(here) >= {"tiny", "twin"}, "one has both")
    eventually(lambda: other.models(there) >= {"tiny", "twin"}, "the other has both")
    for question, answer in ANSWERS.items():
        assert one.ask(here, question, "twin") == answer
        assert other.ask(there, question, "tiny") == answer


def test_models_leave_and_return_with_their_machine(
    places: tuple[Site, Site],
) -> None:
    one, other = places
    here, there = one.serve(*LOOKING), other.serve(*LOOKING)
    with_model(other, there, "twin")
    eventually(lambda: "twin" in one.models(here), "the other's model is here")

    there.program.kill()
    eventually(lambda: "twin" not in one.models(here), "it has gone")

    there = other.serve(*LOOKING)
    with_model(other, there, "twin")
    eventually(lambda: "twin" in one.models(here), "it is back")
    assert one.ask(here, STORY, "twin") == ANSWERS[STORY]


def test_machine_killed_during_an_answer_is_replaced_without_a_gap(
    places: tuple[Site, Site],
) -> None:
    one, other = places
    here, there = one.serve(*LOOKING), other.serve(*LOOKING)
    check_takeover(one, here, other, there)


def test_network_outage_withdraws_the_model_until_it_ends(
    places: tuple[Site, Site],
) -> None:
    one, other = places
    here, there = one.serve(*LOOKING), other.serve(*LOOKING)
    with_model(other, there, "twin")
    eventually(lambda: "twin" in one.models(here), "the other's model is here")

    other.machine.ip("link", "set", other.machine.cable, "down")
    eventually(
        lambda: "twin" not in one.models(here), "it has gone", limit=scaled(90.0)
    )
    other.machine.ip("link", "set", other.machine.cable, "up")

    eventually(lambda: "twin" in one.models(here), "it is back", limit=scaled(90.0))
    assert one.ask(here, "ping", "twin") == "pong"


def test_other_clusters_are_ignored(places: tuple[Site, Site]) -> None:
    one, other = places
    here = one.serve(*LOOKING)
    there = other.serve(*LOOKING[:-1], f"other {REEF}")
    with_model(one, here, "tiny")
    with_model(other, there, "twin")
    refused = re.compile(r"disconnected wire=tealenet .*'closed by peer'")
    eventually(
        lambda: refused.search(here.program.errors + there.program.errors),
        "they have met",
    )

    assert one.models(here) == {"tiny"}
    assert other.models(there) == {"twin"}


def test_named_peers_replace_blocked_multicast(
    places: tuple[Site, Site],
) -> None:
    one, other = places
    for place in places:
        place.machine.ip("link", "set", place.machine.cable, "multicast", "off")
    there = other.serve(*LOOKING, "--tealenet-port", str(PORT))
    with_model(other, there, "twin")
    address = f"{other.machine.address}:{PORT}"
    here = one.serve(*LOOKING, "--tealenet-peers", address)

    eventually(lambda: "twin" in one.models(here), "the other's model is here")
    assert one.ask(here, "ping", "twin") == "pong"
    assert "--tealenet-peers HOST:PORT" in here.program.errors


def test_worker_without_a_url_finds_the_lan_coordinator(
    places: tuple[Site, Site],
) -> None:
    one, other = places
    here = one.serve(*EVERYWHERE)
    worker = other.join("--name", "far", "--model", f"tiny={TINY}")
    worker.event("joined")

    assert one.ask(here, STORY, "tiny") == ANSWERS[STORY]
    assert worker.terminate() == 0


def test_listening_worker_and_the_coordinator_of_its_fleet_find_each_other(
    places: tuple[Site, Site],
) -> None:
    one, other = places
    fleet = ("--token", FLEET_TOKEN, "--tasks", str(TASKS))
    with other.machine.inside():
        worker = other.programs.run(
            "join", "--listen", "--json", "--name", "far", *fleet
        )
    worker.event("listening")

    here = one.serve(*EVERYWHERE, "--macfleet-token", FLEET_TOKEN)

    assert worker.event("joined")["coordinator"]
    met = "met peer='macfleet:far' protection=tls"
    eventually(lambda: met in here.program.errors, "its log says so")
    assert worker.terminate() == 0


@pytest.mark.parametrize("named", [True, False], ids=["named", "found"])
def test_worker_joins_over_tls_a_coordinator_that_has_a_certificate(
    places: tuple[Site, Site], tmp_path: Path, named: bool
) -> None:
    one, other = places
    here = one.serve(*EVERYWHERE, *issue(tmp_path / "tls").flags)
    words: list[str] = here.ready["join"].split()
    token = words[words.index("--token") + 1]
    url = [f"https://{one.machine.address}:{here.port}"] if named else []
    with other.machine.inside():
        worker = other.programs.run(
            *("join", *url, "--json", "--token", token, "--name", "far"),
            *("--model", f"tiny={TINY}"),
        )
    worker.event("joined")

    met = "met peer='shoal:far' protection=noise"
    eventually(lambda: met in here.program.errors, "its log says so")


@pytest.mark.parametrize("flags", [LOOKING, LOOKING[:-2]], ids=["passcode", "nothing"])
def test_unauthenticated_machine_gets_nothing(
    places: tuple[Site, Site], flags: tuple[str, ...]
) -> None:
    one, other = places
    # With a join token, and no passcode.  At a lower level, the log may leave out what
    # strangers cause.
    here = one.serve(*EVERYWHERE, "--log-level", "debug")
    there = other.serve(*flags)
    with_model(one, here, "tiny")
    eventually(lambda: "is not admitted" in here.program.errors, "they have met")

    with pytest.raises(openai.APIStatusError, match="tiny"):
        other.ask(there, "ping", "tiny")
