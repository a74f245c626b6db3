import pytest

from protocols.macfleet.handshake.ends import AS_ORIGINALS, giving, node
from shoal.protocols.macfleet.handshake.challenges import drawn, is_ours, like_heartbeat


def test_a_challenge_of_ours_has_a_mark() -> None:
    challenge = drawn(node("a"))

    assert len(challenge) == 32
    assert is_ours(challenge)


def test_who_does_not_speak_the_strong_handshake_marks_nothing() -> None:
    challenge = drawn(node("a", accepts=AS_ORIGINALS, draw=giving(b"\xff" * 32)))

    assert challenge == b"\xff" * 32
    assert not is_ours(challenge)


@pytest.mark.parametrize(
    ("challenge", "own_id", "like"),
    [
        (b"1234567:" + b"\xff" * 24, "a", False),  # shorter than any real id
        (b"1234567:" + b"\xff" * 24, "1234567", True),  # but ours
        (b"12345678:" + b"\xff" * 23, "a", True),
        (b"1234 678:" + b"\xff" * 23, "a", False),  # no id has white space
        (b"1234\x00678:" + b"\xff" * 23, "a", False),
        (b"1234\xff678:" + b"\xff" * 23, "a", False),  # nor is it something else
        (b":" + b"\xff" * 31, "a", False),
        (b"x:" + b"\xff" * 30, "a", False),
        (b"x:" + b"\xff" * 18 + b':{"ram": 1}', "a", True),
        (b"x:" + b"\xff" * 18 + b":{ram: 1} \xff", "a", False),
        (b"x" * 32, "a", True),
        (bytes(range(32)), "a", False),
        (b"\xff" * 32, "a", False),
    ],
)
def test_what_could_be_a_heartbeat_is_told_from_the_rest(
    challenge: bytes, own_id: str, like: bool
) -> None:
    assert like_heartbeat(challenge, own_id) == like
