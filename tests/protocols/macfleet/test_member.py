"""Challenges that a node answers, and those it remembers."""

import pytest

from shoal.protocols.macfleet.member import (
    REMEMBERED_FOR,
    REMEMBERED_MAX,
    SentChallenges,
    resembles_heartbeat,
)


@pytest.mark.parametrize(
    ("challenge", "own_id", "like"),
    [
        (b"1234567:" + b"\xff" * 24, "a", False),  # shorter than any upstream id
        (b"1234567:" + b"\xff" * 24, "1234567", True),  # but this node's
        (b"12345678:" + b"\xff" * 23, "a", True),
        (b"1234 678:" + b"\xff" * 23, "a", False),  # no id has white space
        (b"1234\x00678:" + b"\xff" * 23, "a", False),
        (b"1234\xff678:" + b"\xff" * 23, "a", False),  # nor is it something else
        (b":" + b"\xff" * 31, "a", False),
        (b"x:" + b"\xff" * 30, "a", False),
        (b"x:" + b"\xff" * 18 + b':{"ram": 1}', "a", True),
        (b"x:" + b"\xff" * 18 + b":{ram: 1} \xff", "a", False),
        (b"x:" + b"\xff" * 19 + b',{"ram": 1}', "a", False),  # no colon before it
        (b"x" * 32, "a", True),
        (bytes(range(32)), "a", False),
        (b"\xff" * 32, "a", False),
    ],
)
def test_challenges_that_resemble_heartbeats_are_recognised(
    challenge: bytes, own_id: str, like: bool
) -> None:
    assert resembles_heartbeat(challenge, own_id) == like


def test_a_challenge_is_remembered_while_it_can_be_answered() -> None:
    outstanding = SentChallenges()

    outstanding.add(b"one", 0.0)
    outstanding.add(b"two", REMEMBERED_FOR - 1)

    assert b"one" in outstanding
    assert b"three" not in outstanding


def test_a_challenge_is_forgotten_after_its_handshake_timed_out() -> None:
    outstanding = SentChallenges()
    outstanding.add(b"one", 0.0)

    outstanding.add(b"two", REMEMBERED_FOR)

    assert b"one" not in outstanding
    assert b"two" in outstanding


def test_the_oldest_challenge_is_evicted_first() -> None:
    outstanding = SentChallenges()
    for number in range(REMEMBERED_MAX + 1):
        outstanding.add(number.to_bytes(4), 0.0)

    assert (0).to_bytes(4) not in outstanding
    assert (1).to_bytes(4) in outstanding
