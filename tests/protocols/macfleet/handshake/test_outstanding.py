from shoal.protocols.macfleet.handshake.outstanding import (
    REMEMBERED_FOR,
    REMEMBERED_MAX,
    Outstanding,
)


def test_a_challenge_is_remembered_while_it_can_be_answered() -> None:
    outstanding = Outstanding()

    outstanding.put(b"one", 0.0)
    outstanding.put(b"two", REMEMBERED_FOR - 1)

    assert b"one" in outstanding
    assert b"three" not in outstanding


def test_a_challenge_is_forgotten_when_nobody_waits_for_the_answer() -> None:
    outstanding = Outstanding()
    outstanding.put(b"one", 0.0)

    outstanding.put(b"two", REMEMBERED_FOR)

    assert b"one" not in outstanding
    assert b"two" in outstanding


def test_when_there_are_too_many_the_oldest_goes() -> None:
    outstanding = Outstanding()
    for number in range(REMEMBERED_MAX + 1):
        outstanding.put(number.to_bytes(4), 0.0)

    assert (0).to_bytes(4) not in outstanding
    assert (1).to_bytes(4) in outstanding
