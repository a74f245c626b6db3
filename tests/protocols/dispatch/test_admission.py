"""Who may register as a worker, and as what."""

import base64
import json
from dataclasses import replace
from typing import Any
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
from protocols.pairs import MEMBER, MODEL, AcceptedWorker, as_worker
from protocols.session_pair import messages_in, sent
from shoal.domain.errors import ConfigError, NotAdmitted
from shoal.domain.job import Privacy
from shoal.domain.vocabulary import CancelJob, Event, Joined
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import DeviceKind, Offer
from shoal.protocols.dispatch import PROTOCOL, Config, endpoints
from shoal.protocols.dispatch.admission import admit_connection
from shoal.protocols.dispatch.codec.extension import (
    HEADER,
    NAME_MAX,
    proof_message,
    read_header,
)
from shoal.protocols.seam.admission import AdmissionCheck, AdmissionGrant, JoinRequest
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.session import Close, Notice, Output

A = SIGNERS["A"]
OURS = HEADER.lower()
BOTH = {JobKind.CHAT, JobKind.TASK}
WORKER = replace(MEMBER, identity=A, token="", only_for=frozenset())


def register(**fields: object) -> str:
    """Return a registration with some fields changed; None leaves one out."""
    message = json.loads(REGISTER) | fields
    return json.dumps({k: v for k, v in message.items() if v is not None})


def proof(accepted: AcceptedWorker, name: str = "A") -> str:
    """Sign what an answer's header asks to be signed."""
    asked = read_header(accepted.headers[HEADER])
    signer = SIGNERS[name]
    signed = signer.sign(proof_message(asked.challenge, asked.key, signer.public_key))
    return base64.b64encode(signed).decode()


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
) -> tuple[list[Event | Output], JoinRequest | None]:
    """Let a worker of ours register; return what came of it, and who applied."""
    requests = []

    def admit(request: JoinRequest) -> AdmissionGrant:
        requests.append(request)
        return (admission or require_token(""))(request)

    dialer = PROTOCOL.dial("http://127.0.0.1:4010", member)
    headers = {name.lower(): value for name, value in dialer.headers.items()}
    accepted = accept(headers, config, admit)
    accepted.session.tick(NOW)
    worker = dialer.start_session(accepted.headers)
    (text,) = sent(worker.tick(NOW))
    outputs = list(accepted.session.receive([text], NOW))
    return outputs, requests[0] if requests else None


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

    connection = admit_connection(UpgradeRequest("/"), Config(open=True), context)

    digit = f"{fill:02x}"[0]
    variant = "8" if fill == 0x00 else "b"
    assert connection.worker_id == (
        f"{digit * 8}-{digit * 4}-4{digit * 3}-{variant}{digit * 3}-{digit * 12}"
    )
    assert UUID(connection.worker_id).version == 4


@pytest.mark.parametrize(
    ("fields", "device", "models", "kinds"),
    [
        ({"provider_type": "SEEKER"}, DeviceKind.PHONE, {"m"}, BOTH),
        ({"capabilities": ["TASK"]}, DeviceKind.DESKTOP, set(), {JobKind.TASK}),
        ({"capabilities": ["LLM_INFER"]}, DeviceKind.DESKTOP, {"m"}, {JobKind.CHAT}),
        ({"provider_pubkey": KEY.upper()}, DeviceKind.DESKTOP, {"m"}, BOTH),
        ({"pricing_hint": "", "x": [1]}, DeviceKind.DESKTOP, {"m"}, BOTH),
        ({"shoal": {"proof": 5}}, DeviceKind.DESKTOP, {"m"}, BOTH),
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


def test_every_connection_has_an_id_and_a_challenge_of_its_own() -> None:
    (endpoint,) = endpoints(Config(), dispatch_context())
    request = UpgradeRequest("/", "", {OURS: "1"})
    one, other = (as_worker(endpoint.accept(request, NOW)) for _ in range(2))

    assert one.headers[HEADER] != other.headers[HEADER]
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

    wrong, _ = join(
        replace(WORKER, token="guess"), require_token("secret"), Config(open=True)
    )
    assert "Invalid token" in refused(wrong)


@pytest.mark.parametrize("token", ["secret", "with space", "ümlaut%20", "a.sha256-x"])
def test_a_shoal_worker_presents_its_token(token: str) -> None:
    outputs, request = join(replace(WORKER, token=token), require_token(token))

    assert [type(each) for each in messages_in(outputs)] == [Joined]
    models = frozenset({MODEL.name})
    assert request == JoinRequest(token, KEY, models, "192.0.2.7")


def test_a_wrong_token_is_refused_with_the_reason() -> None:
    outputs, _ = join(replace(WORKER, token="guess"), require_token("secret"))

    assert refused(outputs) == "Invalid token: check the token"
    (close,) = [each for each in outputs if isinstance(each, Close)]
    assert len(close.text.encode()) <= 123


def test_the_reason_of_the_admission_check_is_passed_on() -> None:
    def admit(request: JoinRequest) -> AdmissionGrant:
        raise NotAdmitted("The token has expired")

    outputs, _ = join(replace(WORKER, token="old"), admit)

    assert "The token has expired" in refused(outputs)


def test_a_token_counts_only_for_a_worker_with_a_name() -> None:
    accepted = accept(
        {"authorization": "Bearer secret"}, admission=require_token("secret")
    )

    outputs = list(accepted.session.receive([REGISTER], NOW))

    assert HEADER in refused(outputs)


def test_a_worker_admitted_under_a_key_must_prove_it() -> None:
    headers = {OURS: f"1, key={KEY}", "authorization": "Bearer secret"}
    session = accept(headers, admission=require_token("secret")).session

    assert "shoal.proof" in refused(list(session.receive([REGISTER], NOW)))
    other = register(provider_pubkey=SIGNERS["B"].public_key.hex())
    assert "shoal.proof" in refused(list(session.receive([other], NOW)))


def test_the_grant_is_passed_on() -> None:
    used = AdmissionGrant("id", "dispatch:" + KEY)

    assert accept(admission=lambda request: used).grant == used


# Proofs.


def test_another_program_can_prove_its_key_without_the_extension() -> None:
    accepted = accept({OURS: "1"})
    accepted.session.tick(NOW)

    text = register(shoal={"proof": proof(accepted)})
    (joined,) = messages_in(accepted.session.receive([text], NOW))

    assert isinstance(joined, Joined)
    assert joined.name == KEY
    assert joined.offer.proven
    assert joined.offer.remark == ""
    assert joined.offer.slots == 1
    assert joined.offer.models == {"dispatch"}
    assert CancelJob not in accepted.session.accepts


def test_a_shoal_workers_offer_has_all_fields() -> None:
    member = replace(
        WORKER,
        tasks=frozenset({"summarize"}),
        device=DeviceKind.PHONE,
        only_for=frozenset({"al", "bo, c=d é"}),
        privacy=Privacy.PRIVATE,
        engine="e",
    )
    outputs, _ = join(member)

    (joined,) = messages_in(outputs)
    assert joined == Joined(
        KEY,
        Offer(
            kinds=frozenset(JobKind),
            models=frozenset({MODEL.name}),
            slots=3,
            features=frozenset(Feature),
            context=4096,
            only_for=member.only_for,
            privacy=Privacy.PRIVATE,
            price=member.price,
            tasks=frozenset({"summarize"}),
            streams=False,
            device=DeviceKind.PHONE,
            public_key=KEY,
            proven=True,
            engine="e",
        ),
    )


def test_a_shoal_worker_can_be_cancelled_once_it_registers() -> None:
    accepted = accept({OURS: f"1, key={KEY}"})
    shoal: dict[str, Any] = {"proof": proof(accepted), "version": 1}

    assert CancelJob not in accepted.session.accepts
    accepted.session.receive([register(shoal=shoal)], NOW)
    assert CancelJob in accepted.session.accepts


def test_a_proof_without_a_version_is_no_extension() -> None:
    accepted = accept({OURS: "1"})
    shoal: dict[str, Any] = {"proof": proof(accepted), "kinds": ["embedding"]}

    outputs = list(accepted.session.receive([register(shoal=shoal)], NOW))

    (joined,) = messages_in(outputs)
    assert isinstance(joined, Joined)
    assert joined.offer.kinds == BOTH
    assert joined.offer.proven


def test_the_proof_of_another_connection_is_refused() -> None:
    (endpoint,) = endpoints(Config(), dispatch_context())
    request = UpgradeRequest("/", "", {OURS: "1"})
    one, other = (as_worker(endpoint.accept(request, NOW)) for _ in range(2))

    text = register(shoal={"proof": proof(one)})

    assert "shoal.proof" in refused(list(other.session.receive([text], NOW)))
    assert messages_in(one.session.receive([text], NOW))


@pytest.mark.parametrize(
    "said",
    [
        None, {}, [], 5, {"proof": 5}, {"proof": ""}, {"proof": "AAAA"},
        {"proof": "A" * 86 + "=="}, {"proof": "A" * 500}, {"proof": None},
    ],
)  # fmt: skip
def test_an_invalid_proof_is_refused(said: object) -> None:
    session = accept({OURS: "1"}).session
    text = json.dumps(json.loads(REGISTER) | {"shoal": said})

    assert "shoal" in refused(list(session.receive([text], NOW)))


def test_a_proof_by_another_key_is_refused() -> None:
    accepted = accept({OURS: "1"})

    text = register(shoal={"proof": proof(accepted, "B")})

    assert "shoal.proof" in refused(list(accepted.session.receive([text], NOW)))


def test_a_proof_for_another_coordinator_is_refused() -> None:
    accepted = accept({OURS: "1"})
    asked = read_header(accepted.headers[HEADER])
    elsewhere = proof_message(asked.challenge, SIGNERS["B"].public_key, A.public_key)
    signed = base64.b64encode(A.sign(elsewhere)).decode()

    text = register(shoal={"proof": signed})

    assert "shoal.proof" in refused(list(accepted.session.receive([text], NOW)))


def test_an_unproven_worker_does_not_replace_a_proven_one() -> None:
    proven, _ = join(WORKER)
    unproven = opened().receive([REGISTER], NOW)

    (one,), (other,) = messages_in(proven), messages_in(unproven)
    assert isinstance(one, Joined)
    assert isinstance(other, Joined)
    assert one.name != other.name


def test_two_workers_with_one_key_are_one_worker() -> None:
    names = [
        each.name
        for name in ("one", "two")
        for each in messages_in(join(replace(WORKER, name=name))[0])
        if isinstance(each, Joined)
    ]

    assert names == [KEY, KEY]


def test_an_operator_may_trust_unproven_keys() -> None:
    session = opened(Config(trust_unproven=True))

    (joined,) = messages_in(session.receive([REGISTER], NOW))

    assert isinstance(joined, Joined)
    assert joined.offer.proven
    assert joined.name == f"{KEY}/unproven"


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"slots": -1}, "slots"), ({"slots": "3"}, "slots"),
        ({"kinds": "chat"}, "kinds"), ({"features": [5]}, "features"),
        ({"context": -1}, "context"),
        ({"tasks": ["x"] * 300}, "tasks"), ({"only_for": ["x" * 300]}, "only_for"),
        ({"version": "1"}, "version"),
    ],
)  # fmt: skip
def test_extension_fields_are_validated(fields: dict[str, object], fault: str) -> None:
    accepted = accept({OURS: "1"})

    said = {"proof": proof(accepted), "version": 1} | fields
    outputs = list(accepted.session.receive([register(shoal=said)], NOW))

    assert fault in refused(outputs)


def test_slots_are_limited() -> None:
    outputs, _ = join(replace(WORKER, slots=10**9))

    (joined,) = messages_in(outputs)
    assert isinstance(joined, Joined)
    assert joined.offer.slots == 1024


@pytest.mark.parametrize("value", ["", "0", "x", "shoal", "-1", "1 1", "é"])
def test_an_invalid_header_announces_nothing(value: str) -> None:
    assert not read_header(value).known
    assert HEADER not in accept({OURS: value}).headers


@pytest.mark.parametrize("value", ["1", "2", "1, new=thing", "99, key=zz, challenge=?"])
def test_unknown_parts_of_newer_headers_are_ignored(value: str) -> None:
    assert read_header(value).known
    assert read_header(value).key == b""


def test_a_model_with_a_long_name_is_refused() -> None:
    longest = "x" * NAME_MAX

    assert joins_with(longest)
    assert not joins_with(longest + "x")


def joins_with(model: str) -> bool:
    session = accept({OURS: f"1, key={KEY}, model={model}"}).session
    answered = list(session.receive([REGISTER], NOW))
    return not any("longer than" in str(each) for each in answered)


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
