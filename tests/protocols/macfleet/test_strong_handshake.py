"""The handshake between Shoal nodes: who is admitted, by what, and what they learn."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.profiles import examples
from protocols.macfleet.handshake_ends import (
    ANNE,
    AS_ORIGINALS,
    BELA,
    TOKEN,
    HandshakeEnd,
    client,
    drawing,
    frame_of,
    joining,
    meet,
    node,
    server,
)
from shoal.coordinator.admission import WorkerAdmission, load_join_tokens
from shoal.domain.credentials import JoinToken, digest_of
from shoal.domain.errors import NotAdmitted, Unavailable
from shoal.protocols.macfleet.codec.frames import Flag, Frame, encode_frame
from shoal.protocols.macfleet.handshake import (
    HandshakeRefused,
    HandshakeSettings,
    HandshakeStrength,
)
from shoal.protocols.macfleet.strong_handshake import SealedVerdict, decide
from shoal.protocols.seam.admission import AdmissionCheck, AdmissionGrant, JoinRequest
from shoal.transports.clock import LoopClock
from store.in_memory import memory_store

JOIN = "jt-lab"  # shorter than a fleet token may be


def met(
    one: HandshakeSettings, other: HandshakeSettings
) -> tuple[HandshakeEnd, HandshakeEnd]:
    """Return both ends after the handshake."""
    dialling, dialled = client(one, ours=True).open(), server(other).open()
    meet(dialling, dialled)
    return dialling, dialled


async def admission(**changed: object) -> AdmissionCheck:
    """Return the admission check of a coordinator with both kinds of tokens."""
    kept = {"uses_max": None, "expires_at": None, "revoked_at": None} | changed
    token = JoinToken("id", "lab", digest_of(JOIN), 0.0, **kept)  # type: ignore[arg-type]  # as JoinToken has them
    async with memory_store() as store:
        await store.keys.tokens.add(token)
        for worker in token.workers:
            await store.keys.bind_worker(token.id, worker)
        admission = WorkerAdmission(
            await load_join_tokens(store.keys), store.keys, LoopClock(lambda: 1000.0)
        )
    return admission.policy_for("macfleet", TOKEN)


def refusing(error: Exception) -> AdmissionCheck:
    def admit(applicant: JoinRequest) -> AdmissionGrant:
        raise error

    return admit


def test_two_nodes_of_a_fleet_authenticate_each_other() -> None:
    one = node("node-b", identity=BELA, features=frozenset({"lanes"}))
    other = node("node-a", identity=ANNE)

    dialling, dialled = met(one, other)

    for end, peer, key, features in (
        (dialling, "node-a", ANNE.public_key, frozenset()),
        (dialled, "node-b", BELA.public_key, frozenset({"lanes"})),
    ):
        assert end.agreed is not None
        assert end.agreed.peer_id == peer
        assert end.agreed.strength is HandshakeStrength.STRONG
        assert end.agreed.profile is not None
        assert end.agreed.profile.chip == peer
        strong = end.agreed.strong
        assert strong is not None
        assert strong.has_token
        assert strong.public_key == key
        assert strong.features == features
        assert strong.admitted == AdmissionGrant()


def test_two_nodes_of_an_open_fleet_prove_only_their_keys() -> None:
    dialling, dialled = met(
        node("node-b", None, identity=BELA), node("node-a", None, identity=ANNE)
    )

    for end, key in ((dialling, ANNE.public_key), (dialled, BELA.public_key)):
        assert end.agreed is not None
        assert end.agreed.strong is not None
        assert not end.agreed.strong.has_token
        assert not end.agreed.strong.in_fleet
        assert end.agreed.strong.public_key == key


class OddIdentity:
    """Has keys of another kind, whose signatures are as long."""

    def __init__(self, size: int) -> None:
        self.public_key = self.exchange_key = bytes(size)

    def sign(self, message: bytes) -> bytes:
        return bytes(64)


@pytest.mark.parametrize("size", [1, 31])
def test_keys_of_another_size_are_refused_even_unverified(size: int) -> None:
    _, dialled = met(
        node("node-b", identity=OddIdentity(size)), node("node-a", verifies=None)
    )

    assert dialled.agreed is None
    assert dialled.refused is not None


def test_without_verification_peers_have_no_keys() -> None:
    dialling, _ = met(node("node-b", verifies=None), node("node-a", identity=ANNE))

    assert dialling.agreed is not None
    assert dialling.agreed.strong is not None
    assert dialling.agreed.strong.public_key == b""


async def test_a_join_token_admits_a_worker_without_a_fleet() -> None:
    own = node("node-a", fleet="lab-7", admission=await admission(uses_max=1))

    dialling, dialled = met(joining("w", JOIN), own)

    assert dialling.agreed is not None
    assert dialling.agreed.strong is not None
    assert dialling.agreed.strong.has_token
    assert dialled.agreed is not None
    assert dialled.agreed.strong is not None
    assert dialled.agreed.strong.admitted == AdmissionGrant("id", "macfleet:w")
    assert dialled.agreed.strong.has_token
    assert not dialled.agreed.strong.in_fleet


async def test_the_fleet_token_admits_a_worker() -> None:
    _, dialled = met(joining("w", TOKEN), node("node-a", admission=await admission()))

    assert dialled.agreed is not None
    assert dialled.agreed.strong is not None
    assert dialled.agreed.strong.admitted == AdmissionGrant()
    assert dialled.agreed.strong.in_fleet


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"revoked_at": 1.0}, "The token was revoked: check --token"),
        ({"expires_at": 1.0}, "The token has expired: check --token"),
        (
            {"uses_max": 1, "workers": frozenset({"macfleet:v"})},
            "The token has been used by other workers: check --token",
        ),
    ],
)
async def test_an_invalid_join_token_is_refused_with_the_reason(
    changed: dict[str, object], why: str
) -> None:
    own = node("node-a", admission=await admission(**changed))

    dialling, dialled = met(joining("w", JOIN), own)

    assert dialling.why == f"10.0.0.2:50052 refuses 'w': {why}"
    assert isinstance(dialling.refused, HandshakeRefused)
    assert dialling.refused.final
    assert not dialled.counts  # it has the token


def test_without_an_admission_check_the_own_token_admits() -> None:
    own = node("node-a", admission=None)

    _, right = met(node("node-b"), own)
    _, wrong = met(node("node-b", "another token"), own)

    assert right.agreed is not None
    assert "Invalid token" in wrong.why


@pytest.mark.parametrize(
    ("one", "other", "why", "counts"),
    [
        (node("b", "another token"), node("a"), "Invalid token: check --token", True),
        (joining("b", "another token"), node("a"), "Invalid token: check", True),
        (node("b", None), node("a"), "this fleet requires a token", False),
        (node("b"), node("a", None), "this fleet is open", False),
        (node("b", fleet="lab-7"), node("a"), "this fleet has another id", False),
    ],
)
def test_a_refusal_contains_the_reason_and_the_remedy(
    one: HandshakeSettings, other: HandshakeSettings, why: str, counts: bool
) -> None:
    dialling, dialled = met(one, other)

    assert f"10.0.0.2:50052 refuses 'b': {why}" in dialling.why
    assert isinstance(dialling.refused, HandshakeRefused)
    assert dialling.refused.final
    assert f"'b' is refused: {why}" in dialled.why
    assert dialled.counts == counts


def test_a_refusal_for_now_is_not_final() -> None:
    busy = refusing(Unavailable("too many wrong keys: try again in 9 s"))

    dialling, dialled = met(node("b"), node("a", admission=busy))

    assert "try again in 9 s" in dialling.why
    assert isinstance(dialling.refused, HandshakeRefused)
    assert not dialling.refused.final
    assert not dialled.counts


def test_a_refusal_is_escaped_for_terminals() -> None:
    nasty = refusing(NotAdmitted("\x1b[2J\u202e"))

    dialling, _ = met(node("b"), node("a", admission=nasty))

    assert dialling.why.isascii()
    assert dialling.why.isprintable()


def test_a_long_refusal_is_cut() -> None:
    dialling, _ = met(node("b"), node("a", admission=refusing(NotAdmitted("x" * 999))))

    assert 500 < len(dialling.why) < 600


def test_both_ends_report_an_id_conflict() -> None:
    dialling, dialled = met(node("a"), node("a"))

    assert "has this node's id" in dialling.why
    assert dialled.agreed is None


def test_an_unexpected_server_receives_no_proof() -> None:
    dialling, dialled = client(node("b"), "c").open(), server(node("a")).open()

    meet(dialling, dialled)

    assert dialling.why == "10.0.0.2:50052 is 'a', expected 'c'"
    assert len(dialling.sent) == 1


def test_strong_second_message_is_not_taken_by_who_has_not_offered_it() -> None:
    dialling = client(node("b", accepts=AS_ORIGINALS)).open()
    dialled = server(node("a")).open()
    first = frame_of(dialling.sent[0])

    dialled.hear(encode_frame(first._replace(flags=first.flags | Flag.STRONG)))
    assert frame_of(dialled.sent[0]).flags & Flag.STRONG
    dialling.hear(dialled.sent[0])

    assert dialling.agreed is None
    assert len(dialling.sent) == 1


def test_leaving_after_a_strong_second_message_is_not_a_failure() -> None:
    dialling, dialled = client(node("b")).open(), server(node("a")).open()
    dialled.hear(dialling.sent[0])

    dialled.hang_up()

    assert not dialled.counts


def test_a_silent_server_times_out_after_ten_seconds() -> None:
    dialling, dialled = client(node("b")).open(), server(node("a")).open()
    dialled.hear(dialling.sent[0])
    dialling.hear(dialled.sent[0], now=5.0)

    dialling.wait()

    assert dialling.handshake.deadline == 15.0
    assert dialling.why == "10.0.0.2:50052 did not answer within 10 s"
    assert isinstance(dialling.refused, HandshakeRefused)
    assert not dialling.refused.final


def test_a_verdict_that_is_cut_is_refused_in_the_servers_name() -> None:
    def exchanged() -> tuple[HandshakeEnd, Frame]:
        dialling, dialled = client(node("b")).open(), server(node("a")).open()
        dialled.hear(dialling.sent[0])
        dialling.hear(dialled.sent[0])
        dialled.hear(dialling.sent[1])
        return dialling, frame_of(dialled.sent[1])

    whole = bytes(exchanged()[1].payload)
    for size in range(0, len(whole), 7):
        dialling, verdict = exchanged()

        dialling.hear(encode_frame(verdict._replace(payload=whole[:size])))

        assert isinstance(dialling.refused, HandshakeRefused)
        assert dialling.why.startswith("10.0.0.2:50052: ")


def test_the_largest_bodies_fit_into_a_message() -> None:
    words = frozenset(f"{number:032}" for number in range(32))
    much: dict[str, Any] = {"identity": ANNE, "fleet": "é" * 999, "features": words}
    profile = b'{"chip_name": "' + b"x" * 8175 + b'"}'

    dialling, dialled = met(
        node("é" * 128, profile=profile, **much),
        node("ö" * 128, profile=profile, **much),
    )

    assert len(profile) == 8192
    assert dialling.agreed is not None
    assert dialled.agreed is not None


@settings(max_examples=examples(0.4))
@given(cuts=st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_any_split_of_the_bytes_gives_the_same_outcome(cuts: list[int]) -> None:
    dialling = client(node("b", identity=BELA)).open()
    dialled = server(node("a", identity=ANNE)).open()
    for teller, hearer in ((dialling, dialled), (dialled, dialling)) * 2:
        data = teller.sent[-1]
        for cut in cuts:
            hearer.hear(data[:cut])
            data = data[cut:]
        hearer.hear(data)

    assert dialling.agreed is not None
    assert dialled.agreed is not None


@pytest.mark.parametrize("make", [server, client])
@given(data=st.binary(max_size=200))
def test_garbage_is_rejected(
    make: Callable[[HandshakeSettings], HandshakeEnd], data: bytes
) -> None:
    end = make(node("a", random_bytes=drawing("garbage"))).open()

    end.hear(data)

    assert end.agreed is None


def test_a_verdict_promises_no_proof_unless_it_says_so() -> None:
    assert not decide(node("a")).proves
    assert not SealedVerdict().proves
