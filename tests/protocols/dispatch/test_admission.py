"""Who may register as a worker, and as what."""

import json
from dataclasses import replace
from uuid import UUID

import pytest

from protocols.contexts import require_token
from protocols.dispatch.recorded import (
    KEY,
    NOW,
    REGISTER,
    SIGNERS,
    accept,
    answers,
    dispatch_context,
    opened,
)
from protocols.pairs import MEMBER, as_worker
from protocols.session_pair import messages_in, sent
from shoal.domain.errors import ConfigError, NotAdmitted
from shoal.domain.vocabulary import CancelJob, Event, Joined
from shoal.domain.work import JobKind
from shoal.domain.worker import DeviceKind, Offer
from shoal.protocols.dispatch import PROTOCOL, Config, endpoints
from shoal.protocols.seam.admission import AdmissionCheck, AdmissionGrant, JoinRequest
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.peer_session import PeerJoined, PeerMessage
from shoal.protocols.seam.session import Close, Notice, Output

BOTH = {JobKind.CHAT, JobKind.TASK}
WORKER = replace(MEMBER, identity=SIGNERS["A"], token="", only_for=frozenset())


def register(**fields: object) -> str:
    """Return a registration with some fields changed; None leaves one out."""
    message = json.loads(REGISTER) | fields
    return json.dumps({k: v for k, v in message.items() if v is not None})


def refused(outputs: list[Event | Output]) -> str:
    (answer,) = answers(outputs)
    assert answer["type"] == "register_ack"
    assert answer["status"] == "error"
    error: str = answer["error"]
    return error


def join(
    member: WorkerProfile,
    admission: AdmissionCheck | None = None,
    config: Config | None = None,
) -> list[Event | Output]:
    """Let a Shoal worker register; return what came of it."""
    dialer = PROTOCOL.dial("http://127.0.0.1:4010", member)
    headers = {name.lower(): value for name, value in dialer.headers.items()}
    session = accept(headers, config, admission).session
    session.tick(NOW)
    (text,) = sent(dialer.start_session({}).tick(NOW))
    return list(session.receive([text], NOW))


def test_an_original_worker_joins_with_the_offer_it_states() -> None:
    session = opened()

    outputs = session.receive([register(pricing_hint="$0.010")], NOW)

    (answer,) = answers(outputs)
    assert answer["status"] == "ok"
    assert len(answer["worker_id"]) == 36
    (joined,) = messages_in(outputs)
    assert joined == Joined(
        f"{KEY}/unproven",
        Offer(
            kinds=frozenset({JobKind.CHAT, JobKind.TASK}),
            models=frozenset({"dispatch"}),
            remark="has not proved its key: it gets private jobs only if the "
            "coordinator runs with --dispatch-trust-unproven",
            streams=False,
            device=DeviceKind.DESKTOP,
            public_key=KEY,
            price="$0.010",
        ),
    )
    assert CancelJob not in session.accepts
    assert [o for o in outputs if isinstance(o, Notice)]


@pytest.mark.parametrize("fill", [0x00, 0xFF])
def test_a_worker_gets_a_random_uuid(fill: int) -> None:
    context = replace(
        dispatch_context(), random_bytes=lambda size: bytes([fill]) * size
    )

    (endpoint,) = endpoints(Config(), context)
    session = as_worker(endpoint.accept(UpgradeRequest("/"), NOW)).session

    (answer,) = answers(session.receive([REGISTER], NOW))

    digit = f"{fill:02x}"[0]
    variant = "8" if fill == 0x00 else "b"
    assert answer["worker_id"] == (
        f"{digit * 8}-{digit * 4}-4{digit * 3}-{variant}{digit * 3}-{digit * 12}"
    )
    assert UUID(answer["worker_id"]).version == 4


@pytest.mark.parametrize(
    ("fields", "device", "models", "kinds"),
    [
        ({"provider_type": "SEEKER"}, DeviceKind.PHONE, {"m"}, BOTH),
        ({"capabilities": ["TASK"]}, DeviceKind.DESKTOP, set(), {JobKind.TASK}),
        ({"capabilities": ["LLM_INFER"]}, DeviceKind.DESKTOP, {"m"}, {JobKind.CHAT}),
        ({"provider_pubkey": KEY.upper()}, DeviceKind.DESKTOP, {"m"}, BOTH),
        ({"pricing_hint": "", "x": [1]}, DeviceKind.DESKTOP, {"m"}, BOTH),
    ],
)  # fmt: skip
def test_the_registration_decides_the_offer(
    fields: dict[str, object], device: DeviceKind, models: set[str], kinds: set[JobKind]
) -> None:
    session = opened(Config(model="m"))

    (joined,) = messages_in(session.receive([register(**fields)], NOW))

    assert isinstance(joined, Joined)
    assert joined.name == f"{KEY}/unproven"
    assert joined.offer.device is device
    assert joined.offer.models == models
    assert joined.offer.kinds == kinds
    assert joined.offer.public_key == KEY


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"provider_pubkey": None}, "provider_pubkey"),
        ({"provider_pubkey": 5}, "provider_pubkey"),
        ({"provider_pubkey": KEY[:-2]}, "provider_pubkey"),
        ({"provider_pubkey": KEY + "zz"}, "provider_pubkey"),
        ({"provider_pubkey": KEY + "\n"}, "provider_pubkey"),
        ({"provider_pubkey": "0x" + KEY}, "provider_pubkey"),
        ({"provider_pubkey": "android_seeker_18f"}, "provider_pubkey"),
        ({"provider_type": None}, "provider_type"),
        ({"provider_type": "TOASTER"}, "provider_type"),
        ({"provider_type": ["DESKTOP"]}, "provider_type"),
        ({"capabilities": None}, "capabilities"),
        ({"capabilities": []}, "capabilities"),
        ({"capabilities": "TASK"}, "capabilities"),
        ({"capabilities": ["TASK", 5]}, "capabilities"),
        ({"capabilities": ["JUGGLE"]}, "capabilities"),
        ({"capabilities": ["TASK"] * 65}, "capabilities"),
    ],
)
def test_an_invalid_registration_is_answered_with_the_invalid_field(
    fields: dict[str, object], fault: str
) -> None:
    session = opened()

    outputs = list(session.receive([register(**fields)], NOW))

    assert fault in refused(outputs)
    assert not messages_in(outputs)
    assert answers(session.receive([REGISTER], NOW))[0]["status"] == "ok"


def test_capabilities_of_newer_workers_are_ignored_and_logged() -> None:
    newer = register(capabilities=["IMAGE_GEN", "TASK", "\u00fc"])

    outputs = list(opened().receive([newer], NOW))

    (joined,) = messages_in(outputs)
    assert isinstance(joined, Joined)
    assert joined.offer.kinds == {JobKind.TASK}
    notices = [each.text for each in outputs if isinstance(each, Notice)]
    assert "ignored unknown capabilities: ['IMAGE_GEN', '\\xfc']" in notices


@pytest.mark.parametrize(
    ("hint", "price", "ask"),
    [
        ("$0.010", "$0.010", 10_000),  # as in the document
        ("0.5", "0.5", 500_000),
        ("cheap", "cheap", None),
        (0.01, "0.01", 10_000),
        (None, "", None),
        ([5], "", None),
        (True, "", None),
        ("x" * 300, "x" * 256, None),
    ],
)
def test_a_pricing_hint_is_a_price_if_it_is_an_amount(
    hint: object, price: str, ask: int | None
) -> None:
    (joined,) = messages_in(opened().receive([register(pricing_hint=hint)], NOW))

    assert isinstance(joined, Joined)
    assert (joined.offer.price, joined.offer.ask) == (price, ask)


def test_registering_again_the_same_way_changes_nothing() -> None:
    session = opened()
    (first,) = answers(session.receive([REGISTER], NOW))

    outputs = session.receive([REGISTER], NOW)

    assert answers(outputs) == [first]
    assert not messages_in(outputs)


def test_registering_again_as_another_is_refused() -> None:
    session = opened()
    session.receive([REGISTER], NOW)

    for text in (
        register(provider_pubkey=SIGNERS["B"].public_key.hex()),
        register(capabilities=["TASK"]),
    ):
        outputs = list(session.receive([text], NOW))
        assert "registered" in refused(outputs)
        assert not messages_in(outputs)


def test_every_connection_has_an_id_of_its_own() -> None:
    (endpoint,) = endpoints(Config(), dispatch_context())
    request = UpgradeRequest("/")
    one, other = (as_worker(endpoint.accept(request, NOW)) for _ in range(2))

    ids = [
        answers(each.session.receive([REGISTER], NOW))[0]["worker_id"]
        for each in (one, other)
    ]
    assert ids[0] != ids[1]


def test_the_first_offered_subprotocol_is_accepted() -> None:
    # As in the recorded case ws-subprotocol.
    offered = {"sec-websocket-protocol": "dispatch.v1, other"}

    assert accept(offered).headers["Sec-WebSocket-Protocol"] == "dispatch.v1"
    assert accept({"sec-websocket-protocol": "a b"}).headers == {}
    assert accept({}).headers == {}


# Tokens.


def test_a_worker_without_a_token_is_refused() -> None:
    accepted = accept(admission=require_token("secret"))
    accepted.session.tick(NOW)

    outputs = list(accepted.session.receive([REGISTER], NOW))

    assert "--dispatch-open" in refused(outputs)
    assert isinstance(outputs[-1], Close)
    assert not messages_in(outputs)
    assert accepted.session.deadline is None


def test_an_open_coordinator_admits_original_workers_and_checks_tokens() -> None:
    accepted = accept(config=Config(open=True), admission=require_token("secret"))
    accepted.session.tick(NOW)
    outputs = accepted.session.receive([REGISTER], NOW)
    assert [type(each) for each in messages_in(outputs)] == [Joined]

    wrong = join(
        replace(WORKER, token="guess"), require_token("secret"), Config(open=True)
    )
    assert "Invalid token" in refused(wrong)


@pytest.mark.parametrize("token", ["secret", "with space", "ümlaut%20", "a.sha256-x"])
def test_a_token_counts_for_the_key_that_is_registered(token: str) -> None:
    requests = []

    def admit(request: JoinRequest) -> AdmissionGrant:
        requests.append(request)
        return require_token(token)(request)

    outputs = join(replace(WORKER, token=token), admit, Config(model="m"))

    assert [type(each) for each in messages_in(outputs)] == [Joined]
    assert requests == [JoinRequest(token, KEY, frozenset({"m"}), "192.0.2.7")]


def test_a_wrong_token_is_refused_with_the_reason() -> None:
    outputs = join(replace(WORKER, token="guess"), require_token("secret"))

    assert refused(outputs) == "Invalid token: check the token"
    (close,) = [each for each in outputs if isinstance(each, Close)]
    assert len(close.text.encode()) <= 123


def test_the_reason_of_the_admission_check_is_passed_on() -> None:
    def admit(request: JoinRequest) -> AdmissionGrant:
        raise NotAdmitted("The token has expired")

    outputs = join(replace(WORKER, token="old"), admit)

    assert "The token has expired" in refused(outputs)


def test_the_grant_is_passed_on() -> None:
    used = AdmissionGrant("id", "dispatch:" + KEY)
    (endpoint,) = endpoints(Config(), dispatch_context(lambda request: used))
    session = endpoint.accept(UpgradeRequest("/"), NOW).session

    joined, *_ = messages_in(session.receive([REGISTER], NOW))

    assert isinstance(joined, PeerMessage)
    assert isinstance(joined.message, PeerJoined)
    assert joined.message.grant == used


def test_an_operator_may_trust_unproven_keys() -> None:
    session = opened(Config(trust_unproven=True))

    (joined,) = messages_in(session.receive([REGISTER], NOW))

    assert isinstance(joined, Joined)
    assert joined.offer.proven
    assert joined.name == f"{KEY}/unproven"


@pytest.mark.parametrize(
    ("url", "dialled"),
    [
        ("http://host:4010", "ws://host:4010/"),
        ("https://host", "wss://host/"),
        ("ws://host:1/a/b?c=d", "ws://host:1/a/b?c=d"),
        ("http://[::1]:4020/", "ws://[::1]:4020/"),
    ],
)
def test_a_url_is_dialled_as_original_workers_dial_it(url: str, dialled: str) -> None:
    assert PROTOCOL.dial(url, WORKER).url == dialled


def test_an_invalid_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected http://HOST:PORT"):
        PROTOCOL.dial("host:4010", WORKER)
