"""Two networks that are connected only by a relay between them."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.speed import scaled
from live.machines import two_networks
from live.programs import Pool, eventually
from live.sites import Site, check_takeover, with_model
from models.tiny_answers import ANSWERS

STORY = "Tell me a story."
PORT = 4010  # of the machine in the middle, which has it to itself
RELAY = ("--host", "0.0.0.0", "--port", str(PORT), "--relay-open")
PATIENCE = scaled(90.0)  # seconds: who lost a relay looks for it every 30 at last

Places = tuple[Site, Site, Site]


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    """The outer machines, and the one in the middle last."""
    with two_networks() as (one, middle, other):
        here, there, between = (Site(each, tmp_path) for each in (one, other, middle))
        try:
            yield here, there, between
        finally:
            for place in (here, there, between):
                place.programs.close()


def member(place: Site) -> Pool:
    """Start a coordinator that joins the relay in the middle."""
    relay = f"ws://{place.machine.peer_address}:{PORT}/ws"
    return place.serve("--tealenet-relays", relay, "--tealenet-open")


def test_pools_of_two_networks_share_models(places: Places) -> None:
    one, other, between = places
    between.serve(*RELAY)
    with one.machine.inside(), pytest.raises(OSError, match="unreachable"):
        socket.create_connection((other.machine.address, PORT), 5.0)
    here, there = member(one), member(other)
    with_model(one, here, "tiny")
    with_model(other, there, "twin")

    eventually(lambda: one.models(here) >= {"tiny", "twin"}, "one has both")
    eventually(lambda: other.models(there) >= {"tiny", "twin"}, "the other has both")
    for question, answer in ANSWERS.items():
        assert one.ask(here, question, "twin") == answer
        assert other.ask(there, question, "tiny") == answer
    # Their own worker, and through the relay the other's.
    assert one.protections(here) == {"noise", "teale"}


def test_relays_own_pool_takes_part_only_if_open(places: Places) -> None:
    one, _, between = places
    middle = between.serve(*RELAY)
    here = member(one)
    with_model(one, here, "tiny")
    with_model(between, middle, "twin")
    assert between.models(middle) == {"twin"}

    middle.program.kill()
    middle = between.serve(*RELAY, "--tealenet-open")

    eventually(lambda: "tiny" in between.models(middle), "they have met", PATIENCE)
    assert between.ask(middle, "ping", "tiny") == "pong"


def test_pool_killed_during_an_answer_is_replaced_without_a_gap(
    places: Places,
) -> None:
    one, other, between = places
    between.serve(*RELAY)
    here, there = member(one), member(other)
    check_takeover(one, here, other, there)


def test_restarted_relay_is_found_again(places: Places) -> None:
    one, other, between = places
    relay = between.serve(*RELAY)
    here, there = member(one), member(other)
    with_model(other, there, "twin")
    eventually(lambda: "twin" in one.models(here), "the other's model is here")

    relay.program.kill()
    eventually(lambda: "twin" not in one.models(here), "it has gone")
    between.serve(*RELAY)

    eventually(lambda: "twin" in one.models(here), "it is back", PATIENCE)
    assert one.ask(here, STORY, "twin") == ANSWERS[STORY]
