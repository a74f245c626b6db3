"""The handshake of ranks, between its two ends and under attack."""

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.errors import NotAdmitted
from shoal.protocols.seam.ranks import RankIdentity, RankRefused, SegmentLabel
from shoal.protocols.shoal.ranks import OTHER_SECRET, RankHandshakeEnd, ShoalRanks

PORT = "rank-abc"
CLIENT = "group/0/1"
SECRET = "the secret of the group"
numbers = count()


def random_bytes(size: int) -> bytes:
    return next(numbers).to_bytes(size)


def dialling(secret: str = SECRET, server: str = PORT) -> RankHandshakeEnd:
    identity = RankIdentity(CLIENT, secret, random_bytes)
    return ShoalRanks().client(identity, server, "host:1")


def accepting() -> RankHandshakeEnd:
    def secret_of(client: str) -> str:
        if client != CLIENT:
            raise NotAdmitted("no such rank")
        return SECRET

    identity = RankIdentity(PORT, "", random_bytes)
    return ShoalRanks().server(identity, "host:2", secret_of)


def deliver(data: bytes, end: RankHandshakeEnd) -> tuple[bytes, str | None]:
    """Give an end one message; return its answer, and the peer if it is proven."""
    head, body = data[: end.head_size], data[end.head_size :]
    assert end.body_size(head) == len(body)
    return end.receive(head, body, 0.0)


def talk(
    client: RankHandshakeEnd,
    server: RankHandshakeEnd,
    certificates: tuple[bytes, bytes] = (b"", b""),
) -> Iterator[tuple[bytes, str | None]]:
    """Yield what each end answers, in turn, until both know the other."""
    client.on_open(certificates[0])
    server.on_open(certificates[1])
    data, peer = client.start(0.0), None
    for end in (server, client) * 2:
        data, peer = deliver(data, end)
        yield data, peer


@pytest.mark.parametrize("certificate", [b"", b"a fingerprint"])
def test_both_ends_learn_who_the_other_is(certificate: bytes) -> None:
    steps = [*talk(dialling(), accepting(), (certificate, certificate))]

    assert [peer for _, peer in steps] == [None, None, CLIENT, PORT]
    assert steps[-1][0] == b""


@pytest.mark.parametrize(
    ("client", "certificates", "reason"),
    [
        (dialling("another secret"), (b"", b""), OTHER_SECRET),
        (dialling(), (b"of a man in the middle", b"of the rank"), OTHER_SECRET),
        (dialling(server="rank-xyz"), (b"", b""), "and not 'rank-xyz'"),
    ],
    ids=["secret", "certificate", "port"],
)
def test_who_is_someone_else_is_refused(
    client: RankHandshakeEnd, certificates: tuple[bytes, bytes], reason: str
) -> None:
    server = accepting()
    with pytest.raises(RankRefused, match=reason) as refused:
        [*talk(client, server, certificates)]

    # The other end is told why.
    told = dialling()
    with pytest.raises(RankRefused, match=reason):
        deliver(refused.value.send, told)


def test_what_was_recorded_proves_nothing_later() -> None:
    client, server = dialling(), accepting()
    recorded = [client.start(0.0), *(data for data, _ in talk(client, server))]
    other = accepting()
    other.on_open(b"")

    deliver(recorded[0], other)
    with pytest.raises(RankRefused, match=OTHER_SECRET):
        deliver(recorded[2], other)


def test_an_end_that_sends_everything_back_proves_nothing() -> None:
    client = ShoalRanks().client(
        RankIdentity(CLIENT, SECRET, random_bytes), CLIENT, "host:1"
    )
    client.on_open(b"")
    proof, _ = deliver(client.start(0.0), client)

    with pytest.raises(RankRefused, match=OTHER_SECRET):
        deliver(proof, client)


@given(st.binary(min_size=3, max_size=200), st.booleans())
def test_other_bytes_are_refused(data: bytes, begun: bool) -> None:
    server = accepting()
    server.on_open(b"")
    if begun:
        deliver(dialling().start(0.0), server)

    def receive(head: bytes, rest: bytes) -> None:
        size = server.body_size(head)
        server.receive(head, rest[:size].ljust(size, b"\0"), 0.0)

    with pytest.raises(RankRefused):
        receive(data[:3], data[3:])


@given(
    st.builds(
        SegmentLabel,
        st.integers(1, 255),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
        st.integers(0, 0xFFF),
        st.integers(0, 0xFFFFF),
    ),
    st.integers(0, 2**40),
)
def test_a_segment_keeps_its_label_and_size(label: SegmentLabel, size: int) -> None:
    ranks = ShoalRanks()

    head = ranks.encode_segment(label, size)

    assert len(head) == ranks.head_size
    assert ranks.decode_segment(head) == (label, size)
