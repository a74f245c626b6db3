"""The first line of a connection to a shard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import PeerError
from shoal.ledger.keys import Signer
from shoal.worker.shard_hello import Purpose, read_hello, write_hello
from worker.fake_shards import GROUP, PROTOCOL, RUNNER

HERE, ELSEWHERE = bytes(32), bytes([1]) * 32  # hashes of certificates
KEY = RUNNER.public_key.hex()


def read(line: bytes, certificate: bytes = HERE) -> Purpose:
    return read_hello(line, GROUP, KEY, PROTOCOL, certificate)


@pytest.mark.parametrize("purpose", Purpose)
def test_hello_of_the_runner_is_read(purpose: Purpose) -> None:
    line = write_hello(RUNNER, GROUP, purpose, PROTOCOL, HERE)

    assert len(line.splitlines()) == 1
    assert read(line.rstrip()) is purpose


def test_others_are_refused_with_the_reason() -> None:
    other = Signer.from_seed(bytes([1]) * 32)
    valid = write_hello(RUNNER, GROUP, Purpose.DATA, PROTOCOL, HERE)
    cases = {
        "another key": write_hello(other, GROUP, Purpose.DATA, PROTOCOL, HERE),
        "another certificate": write_hello(
            RUNNER, GROUP, Purpose.DATA, PROTOCOL, ELSEWHERE
        ),
        "the signature is invalid": valid.replace(b'"data"', b'"heartbeat"'),
        "of the group big-1, not big-2": write_hello(
            RUNNER, "big-2", Purpose.DATA, PROTOCOL, HERE
        ),
        "speaks ggml-rpc 8.0.0, the other one ggml-rpc 7.0.0": write_hello(
            RUNNER, GROUP, Purpose.DATA, "ggml-rpc 7.0.0", HERE
        ),
        "no hello of a machine": valid.replace(b'"group"', b'"grope"'),
    }

    for reason, line in cases.items():
        with pytest.raises(PeerError, match=reason):
            read(line)


@given(st.binary() | st.from_regex(rb'\{"group":"[^"]*","purpose":"data".*\}'))
def test_any_bytes_are_a_hello_or_refused(line: bytes) -> None:
    with pytest.raises(PeerError):
        read(line)


@given(st.integers(0, 400), st.integers(1, 255))
def test_changed_hello_is_refused(place: int, change: int) -> None:
    original = write_hello(RUNNER, GROUP, Purpose.DATA, PROTOCOL, HERE).rstrip()
    line = bytearray(original)
    line[place % len(line)] ^= change

    try:
        assert read(bytes(line)) is Purpose.DATA
    except PeerError:
        return
    assert bytes(line).lower() == original.lower()  # of a hexadecimal digit
