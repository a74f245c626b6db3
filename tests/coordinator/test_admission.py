from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from shoal.coordinator.admission import (
    REVOKED,
    WorkerAdmission,
    load_join_tokens,
)
from shoal.coordinator.auth_throttle import BLOCK_AFTER, AuthThrottle, CredentialKind
from shoal.domain.credentials import (
    JoinToken,
    digest_of,
    with_fingerprint,
    without_key,
)
from shoal.domain.errors import NotAdmitted, TooManyFailures
from shoal.protocols.seam.admission import AdmissionGrant, JoinRequest, TokenProof
from shoal.protocols.seam.session import Batch, CloseCode
from shoal.protocols.seam.token_proof import (
    PresentedProof,
    ProofRole,
    prove_token,
)
from shoal.store.sql.keys import SqlKeys
from shoal.transports.clock import LoopClock
from shoal.transports.link import LinkClosed
from store.in_memory import memory_store

FINGERPRINT = b"\x00\xff" * 16
AWAY = "192.0.2.7"
NOW = 1000.0


class RecordedLink:
    """A connection that records how it was closed."""

    peer = "test"

    def __init__(self) -> None:
        self.closed: tuple[int, str] | None = None

    async def receive(self) -> Batch:
        raise LinkClosed("nothing to receive")

    async def send(self, data: bytes | str) -> None:
        pass

    async def close(self, code: int, text: str) -> None:
        self.closed = (code, text)


@pytest.fixture
async def store() -> AsyncIterator[SqlKeys]:
    async with memory_store() as store:
        yield store.keys


@pytest.fixture
async def admission(store: SqlKeys) -> WorkerAdmission:
    return await opened(store)


async def opened(store: SqlKeys) -> WorkerAdmission:
    return WorkerAdmission(await load_join_tokens(store), store, LoopClock(lambda: NOW))


async def make(
    admission: WorkerAdmission,
    name: str = "lab",
    *,
    expires_at: float | None = None,
    uses_max: int | None = None,
    models: tuple[str, ...] = (),
) -> JoinToken:
    """Make a token, ``jt-`` and its name."""
    token = JoinToken(
        f"token_{name}",
        name,
        digest_of(f"jt-{name}"),
        0.0,
        expires_at,
        None,
        uses_max,
        models,
    )
    await admission.tokens.add(token)
    return token


def admit(
    admission: WorkerAdmission,
    token: str | TokenProof,
    name: str = "w",
    model: str = "m",
    static: str = "first",
    address: str = AWAY,
) -> AdmissionGrant:
    policy = admission.policy_for("wire", static)
    return policy(JoinRequest(token, name, frozenset({model}), address))


async def test_static_token_is_not_a_join_token(
    admission: WorkerAdmission,
) -> None:
    assert admit(admission, "first") == AdmissionGrant()
    assert admit(admission, "first", "another") == AdmissionGrant()


def proof_of(token: str) -> TokenProof:
    """Return a proof of a token."""
    proof = prove_token(digest_of(token), ProofRole.DIALLING, b"a channel")
    presented = PresentedProof(proof, ProofRole.DIALLING, b"a channel")
    return TokenProof(presented.matches)


async def test_a_proof_is_compared_with_each_token(
    admission: WorkerAdmission,
) -> None:
    for name in ("one", "two", "three"):
        await make(admission, name, uses_max=1)

    assert admit(admission, proof_of("first")) == AdmissionGrant()
    assert admit(admission, proof_of("jt-two")) == AdmissionGrant("token_two", "wire:w")
    with pytest.raises(NotAdmitted, match="used by other workers"):
        admit(admission, proof_of("jt-two"), "another")
    with pytest.raises(NotAdmitted, match="Invalid token"):
        admit(admission, proof_of("jt-four"))


async def test_a_revoked_or_expired_token_admits_by_no_proof(
    admission: WorkerAdmission,
) -> None:
    await make(admission, "late", expires_at=NOW - 1)
    await admission.revoke(await make(admission))

    with pytest.raises(NotAdmitted, match="expired"):
        admit(admission, proof_of("jt-late"))
    with pytest.raises(NotAdmitted, match="revoked"):
        admit(admission, proof_of("jt-lab"))


async def test_wrong_proofs_count_as_guesses(admission: WorkerAdmission) -> None:
    for _ in range(BLOCK_AFTER):
        with pytest.raises(NotAdmitted):
            admit(admission, proof_of("a guess"))

    with pytest.raises(TooManyFailures):
        admission.check(AWAY)


async def test_guesses_of_tokens_count_with_those_of_other_secrets(
    store: SqlKeys,
) -> None:
    failures = AuthThrottle()
    tokens = await load_join_tokens(store)
    admission = WorkerAdmission(tokens, store, LoopClock(lambda: NOW), failures)

    for _ in range(BLOCK_AFTER):
        with pytest.raises(NotAdmitted):
            admit(admission, proof_of("a guess"))

    with pytest.raises(TooManyFailures):
        failures.check(CredentialKind.JOIN_TOKEN, AWAY, LoopClock(lambda: NOW).now())


async def test_without_a_static_token_everyone_is_admitted(
    admission: WorkerAdmission,
) -> None:
    assert admit(admission, "whatever", static="") == AdmissionGrant()


async def test_the_join_token_admits_beside_a_wires_own(
    admission: WorkerAdmission,
) -> None:
    admit = admission.policy_for("wire", "the wire's", "first")

    for token in ("the wire's", "first"):
        assert admit(JoinRequest(token, "w", frozenset())) == AdmissionGrant()
    with pytest.raises(NotAdmitted):
        admit(JoinRequest("", "w", frozenset(), AWAY))


async def test_without_a_join_token_a_wires_own_is_required(
    admission: WorkerAdmission,
) -> None:
    admit = admission.policy_for("wire", "the wire's", "")

    assert admit(JoinRequest("the wire's", "w", frozenset())) == AdmissionGrant()
    with pytest.raises(NotAdmitted):
        admit(JoinRequest("another", "w", frozenset(), AWAY))


async def test_join_token_works_beside_the_static_token(
    admission: WorkerAdmission,
) -> None:
    await make(admission)

    assert admit(admission, "jt-lab") == AdmissionGrant("token_lab", "wire:w")


@pytest.mark.parametrize("token", ["first", "jt-lab"])
async def test_certificate_in_a_token_is_not_compared(
    admission: WorkerAdmission, token: str
) -> None:
    await make(admission)

    # Also a renewed one: nodes of other programs present what they have.
    assert admit(admission, with_fingerprint(token, FINGERPRINT)) == admit(
        admission, token
    )


@pytest.mark.parametrize("token", ["", "jt-", "jt-labx", "lab", "token_lab", "\ud800"])
async def test_wrong_token_is_rejected(admission: WorkerAdmission, token: str) -> None:
    await make(admission)

    with pytest.raises(NotAdmitted, match=r"^Invalid token$"):
        admit(admission, token)


async def test_expired_token_is_rejected_as_expired(
    admission: WorkerAdmission,
) -> None:
    await make(admission, "old", expires_at=NOW)
    await make(admission, "young", expires_at=NOW + 1)

    admit(admission, "jt-young")
    with pytest.raises(NotAdmitted, match="has expired"):
        admit(admission, "jt-old")


async def test_token_is_limited_to_its_models(
    admission: WorkerAdmission,
) -> None:
    await make(admission, models=("qwen*", "tiny"))

    admit(admission, "jt-lab", model="qwen3-8b")
    with pytest.raises(NotAdmitted, match="not for this model"):
        admit(admission, "jt-lab", model="llama3")


async def test_token_of_one_use_belongs_to_its_first_worker(
    admission: WorkerAdmission,
) -> None:
    await make(admission, uses_max=1)
    admit(admission, "jt-lab", "first one")

    admit(admission, "jt-lab", "first one")
    with pytest.raises(NotAdmitted, match="used by other workers"):
        admit(admission, "jt-lab", "second one")


async def test_worker_with_two_models_uses_a_token_once(
    admission: WorkerAdmission,
) -> None:
    await make(admission, uses_max=1)

    assert admit(admission, "jt-lab", model="a") == admit(
        admission, "jt-lab", model="b"
    )


async def test_known_worker_rejoins_with_an_expired_token(
    admission: WorkerAdmission,
) -> None:
    token = await make(admission, uses_max=2, expires_at=NOW + 1)
    admit(admission, "jt-lab", "old")
    admission.tokens.update(replace(admission.tokens.find("lab"), expires_at=NOW))

    assert admit(admission, "jt-lab", "old") == AdmissionGrant(token.id, "wire:old")
    with pytest.raises(NotAdmitted, match="has expired"):
        admit(admission, "jt-lab", "new")


KEY, OTHER_KEY = "a" * 64, "b" * 64


def admit_key(
    admission: WorkerAdmission, token: str, key: str, name: str = "w"
) -> AdmissionGrant:
    policy = admission.policy_for("wire", "first")
    return policy(JoinRequest(token, name, frozenset({"m"}), AWAY, key))


@pytest.mark.parametrize(
    "limits", [{"uses_max": 1}, {"expires_at": NOW + 1}], ids=["uses", "time"]
)
async def test_worker_rejoins_by_its_key_without_the_token(
    admission: WorkerAdmission, store: SqlKeys, limits: dict[str, Any]
) -> None:
    await make(admission, **limits)
    await admission.record_use(admit_key(admission, "jt-lab", KEY))
    again = await opened(store)
    again.tokens.update(replace(again.tokens.find("lab"), expires_at=NOW))

    assert admit_key(again, "", KEY).token_id == "token_lab"
    for key, name in [(OTHER_KEY, "w"), (KEY, "another"), ("", "w")]:
        with pytest.raises(NotAdmitted, match="Invalid token"):
            admit_key(again, "", key, name)
    await again.revoke(again.tokens.find("lab"))
    with pytest.raises(NotAdmitted, match="revoked"):
        admit_key(again, "", KEY)


async def test_worker_with_a_new_key_rejoins_by_the_token(
    admission: WorkerAdmission, store: SqlKeys
) -> None:
    await make(admission, uses_max=1)
    await admission.record_use(admit_key(admission, "jt-lab", KEY))

    await admission.record_use(admit_key(admission, "jt-lab", OTHER_KEY))

    (token,) = await store.tokens.all()
    assert token.workers == {f"wire:w key:{KEY}"}


async def test_only_names_that_begin_alike_are_compared(
    admission: WorkerAdmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await make(admission, uses_max=1000)
    bound = frozenset(f"wire:n{number} key:{KEY}" for number in range(100))
    admission.tokens.update(replace(token, workers=bound | {f"wire:w2 key:{KEY}"}))
    compared = []

    def recorded(name: str) -> str:
        compared.append(name)
        return without_key(name)

    monkeypatch.setattr("shoal.coordinator.admission.without_key", recorded)

    grant = admit_key(admission, "jt-lab", OTHER_KEY)

    assert grant.worker == f"wire:w key:{OTHER_KEY}"
    assert compared == [f"wire:w2 key:{KEY}"]


async def test_key_binds_to_no_unlimited_token(admission: WorkerAdmission) -> None:
    await make(admission)
    admit_key(admission, "jt-lab", KEY)
    admit_key(admission, "first", KEY)

    with pytest.raises(NotAdmitted, match="Invalid token"):
        admit_key(admission, "", KEY)


async def test_recorded_use_survives_a_restart(
    admission: WorkerAdmission, store: SqlKeys
) -> None:
    await make(admission, uses_max=1)
    await admission.record_use(admit(admission, "jt-lab", "first one"))

    again = await opened(store)

    with pytest.raises(NotAdmitted, match="used by other workers"):
        admit(again, "jt-lab", "second one")
    admit(again, "jt-lab", "first one")


async def test_unlimited_token_records_no_uses(
    admission: WorkerAdmission, store: SqlKeys
) -> None:
    await make(admission)

    for number in range(100):
        await admission.record_use(admit(admission, "jt-lab", f"w{number}"))

    (token,) = await store.tokens.all()
    assert token.workers == frozenset()


async def test_worker_without_a_token_uses_none(
    admission: WorkerAdmission, store: SqlKeys
) -> None:
    await make(admission, uses_max=1)

    await admission.record_use(AdmissionGrant())

    (token,) = await store.tokens.all()
    assert token.workers == frozenset()


async def test_revocation_disconnects_the_workers_of_the_token(
    admission: WorkerAdmission,
) -> None:
    lab, other = await make(admission), await make(admission, "other")
    links = [RecordedLink(), RecordedLink(), RecordedLink(), RecordedLink()]
    passes = [
        admit(admission, "jt-lab", "a"),
        admit(admission, "jt-lab", "b"),
        admit(admission, "jt-other", "c"),
        admit(admission, "first", "d"),
    ]
    blocks = [
        admission.track(admitted, link)
        for admitted, link in zip(passes, links, strict=True)
    ]
    for block in blocks:
        block.__enter__()
    assert (admission.count_connected(lab), admission.count_connected(other)) == (2, 1)

    revoked = await admission.revoke(lab)

    assert revoked.revoked_at == NOW
    gone = (CloseCode.POLICY_VIOLATION, REVOKED)
    assert [link.closed for link in links] == [gone, gone, None, None]
    for block in blocks:
        block.__exit__(None, None, None)
    assert (admission.count_connected(lab), admission.count_connected(other)) == (0, 0)
    assert not admission._links
    with pytest.raises(NotAdmitted, match="was revoked"):
        admit(admission, "jt-lab", "a")


async def test_worker_whose_token_is_revoked_during_admission_is_rejected(
    admission: WorkerAdmission,
) -> None:
    token = await make(admission, uses_max=1)
    admitted = admit(admission, "jt-lab")
    await admission.record_use(admitted)

    await admission.revoke(token)

    with pytest.raises(NotAdmitted, match="was revoked"):
        admission.track(admitted, RecordedLink()).__enter__()


async def test_address_that_keeps_guessing_is_banned(
    admission: WorkerAdmission,
) -> None:
    await make(admission)
    for number in range(BLOCK_AFTER):
        with pytest.raises(NotAdmitted):
            admit(admission, f"guess {number}")

    with pytest.raises(TooManyFailures):
        admission.check(AWAY)
    admission.check("192.0.2.8")


async def test_loopback_can_always_join_by_a_token_that_nobody_can_guess(
    admission: WorkerAdmission,
) -> None:
    await make(admission)
    for number in range(BLOCK_AFTER):
        with pytest.raises(NotAdmitted):
            admit(admission, f"guess {number}", address="127.0.0.1")

    with pytest.raises(TooManyFailures):
        admit(admission, "guess", address="127.0.0.1")

    admission.check("127.0.0.1")
    admit(admission, "jt-lab", address="127.0.0.1")
    strong = "f85c0bfd0c9658e7b1baab8e5fe289e4"
    policy = admission.policy_for("wire", "first", strong)
    policy(JoinRequest(strong, "w", frozenset(), "127.0.0.1"))
    with pytest.raises(TooManyFailures):
        policy(JoinRequest("first", "w", frozenset(), "127.0.0.1"))


async def test_weak_passcode_is_refused_while_others_guess_it(
    admission: WorkerAdmission,
) -> None:
    for address in (AWAY, "127.0.0.1"):
        admission.check_passcode(address)
        for _ in range(BLOCK_AFTER):
            admission.failed(address)

        with pytest.raises(TooManyFailures, match="wrong passcodes"):
            admission.check_passcode(address)

    admission.check("127.0.0.1")


async def test_missing_token_is_not_a_guess(admission: WorkerAdmission) -> None:
    admit = admission.policy_for("wire", "first")

    for _ in range(2 * BLOCK_AFTER):
        with pytest.raises(NotAdmitted):
            admit(JoinRequest("", "w", frozenset(), AWAY))
        admission.check(AWAY)


async def test_expired_token_is_not_a_guess(admission: WorkerAdmission) -> None:
    await make(admission, expires_at=NOW)
    for _ in range(2 * BLOCK_AFTER):
        with pytest.raises(NotAdmitted, match="expired"):
            admit(admission, "jt-lab")

    admission.check(AWAY)


@pytest.mark.parametrize(
    ("fingerprint", "token", "name", "command"),
    [
        (None, "t", "", "shoal join URL --token t"),
        (None, "", "", "shoal join URL"),
        (None, "t", "otter", "shoal join URL --token t --name otter"),
        (b"\0" * 32, "t", "", f"shoal join URL --token t.sha256-{'A' * 43}"),
        (b"\0" * 32, "", "", f"shoal join URL --token any.sha256-{'A' * 43}"),
    ],
)
async def test_invitation_is_accepted_as_pasted(
    admission: WorkerAdmission,
    fingerprint: bytes | None,
    token: str,
    name: str,
    command: str,
) -> None:
    admission.urls = lambda: ["URL"]
    admission.fingerprint = fingerprint

    assert admission.invitation(token, name) == command


async def test_wrong_passcodes_count_like_wrong_tokens(
    admission: WorkerAdmission,
) -> None:
    for _ in range(BLOCK_AFTER + 5):
        admission.failed(AWAY)

    with pytest.raises(TooManyFailures):
        admission.check(AWAY)
