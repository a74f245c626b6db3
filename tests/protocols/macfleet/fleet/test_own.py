"""What a node says of itself, and what it remembers of others."""

from protocols.macfleet.fleet.fleets import KEY, member
from shoal.protocols.macfleet.fleet.own import SAID_MAX, Said
from shoal.protocols.macfleet.wire.hardware import Profile, read_profile
from shoal.protocols.macfleet.wire.lines import Heard


def test_line_is_new_once_and_the_oldest_is_forgotten_first() -> None:
    said = Said()
    lines = [Heard("b", number.to_bytes(16)) for number in range(SAID_MAX + 1)]

    assert not any(said.before(KEY, each) for each in lines)
    assert said.before(KEY, lines[-1])
    assert said.before(KEY, lines[1])
    assert not said.before(KEY, lines[0])


def test_lines_that_differ_in_anything_are_different() -> None:
    said = Said()
    lines = [
        Heard("b", b"1"),
        Heard("c", b"1"),
        Heard("b", b"2"),
        Heard("b", b"1", b"{}"),
    ]

    assert not any(said.before(KEY, each) for each in lines)


def test_word_tells_the_hardware_as_it_is_and_only_if_asked() -> None:
    profile = Profile(chip="M4", data_port=7)
    own = member(profile=profile)

    first, second = own.word(hardware=True), own.word(hardware=False)

    assert first.hardware is not None
    assert read_profile(first.hardware) == profile
    assert second.hardware is None
    assert first.nonce != second.nonce
    assert member(key=None).word(hardware=True) == Heard("node-a")
