"""Exchanges recorded with the real coordinator, and sessions to replay them on."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from protocols.contexts import protocol_context, require_token
from protocols.each_case import Test, in_each_case
from protocols.pairs import AcceptedWorker, as_worker
from protocols.session_pair import sent
from shoal.domain.vocabulary import Event
from shoal.ledger.keys import Signer
from shoal.protocols.dispatch import Config, endpoints
from shoal.protocols.seam.admission import AdmissionCheck
from shoal.protocols.seam.context import ProtocolContext
from shoal.protocols.seam.endpoints import UpgradeRequest
from shoal.protocols.seam.session import CoordinatorEnd, Data, Output

VECTORS = Path(__file__).parent / "vectors" / "dispatch.json"

Case: TypeAlias = dict[str, Any]  # as recorded; the fields depend on the kind
RECORDED = json.loads(VECTORS.read_text("utf-8"))
CASES: dict[str, Case] = {case["id"]: case for case in RECORDED["cases"]}

SIGNERS = {
    name: Signer.from_seed(bytes.fromhex(key["seed_hex"]))
    for name, key in RECORDED["meta"]["keys"].items()
}
KEY = SIGNERS["A"].public_key.hex()
REGISTER = (
    f'{{"type":"register","provider_pubkey":"{KEY}","provider_type":"DESKTOP",'
    '"capabilities":["LLM_INFER","TASK"]}'
)
NOW = 7.0


def of_kind(kind: str) -> pytest.MarkDecorator:
    """Run a test for every recorded case of one kind."""
    cases = [case for case in CASES.values() if case["kind"] == kind]
    return pytest.mark.parametrize("case", cases, ids=lambda case: case["id"])


def each_of_kind(kind: str) -> Callable[[Test], Test]:
    """Run a test without a socket for every recorded case of one kind, as one test."""
    return in_each_case(
        {name: case for name, case in CASES.items() if case["kind"] == kind}
    )


class CountedBytes:
    """Random bytes that are all different, and the same in each run."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, size: int) -> bytes:
        self._count += 1
        return self._count.to_bytes(size)


def dispatch_context(admission: AdmissionCheck | None = None) -> ProtocolContext:
    """Return a context whose random bytes are all different."""
    context = protocol_context(admission=admission or require_token(""))
    return replace(context, random_bytes=CountedBytes())


def accept(
    headers: dict[str, str] | None = None,
    config: Config | None = None,
    admission: AdmissionCheck | None = None,
    path: str = "/",
) -> AcceptedWorker:
    """Let somebody connect; ``headers`` are lower case."""
    (endpoint,) = endpoints(config or Config(), dispatch_context(admission))
    request = UpgradeRequest(path, "", headers or {}, "192.0.2.7")
    assert endpoint.claims(request)
    return as_worker(endpoint.accept(request, NOW))


def opened(config: Config | None = None) -> CoordinatorEnd:
    """Return the session of a connection that has just been opened."""
    session = accept(config=config).session
    assert list(session.tick(NOW)) == []
    return session


def registered(text: Data = REGISTER, config: Config | None = None) -> CoordinatorEnd:
    """Return the session of a worker that has registered as an original one does."""
    session = opened(config)
    answers(session.receive([text], NOW))
    return session


def answers(outputs: Sequence[Event | Output]) -> list[dict[str, Any]]:
    """Return the messages that are sent, decoded."""
    return [json.loads(data) for data in sent(outputs)]


def summary(text: Data) -> str:
    """Say what a message is in a word or two: its type, and its code or status."""
    message = json.loads(text)
    return f"{message['type']} {message.get('code', message.get('status', ''))}".strip()
