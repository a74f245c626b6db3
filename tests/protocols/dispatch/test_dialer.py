"""What original coordinators answer over HTTP, as recorded."""

import json

import pytest

from protocols.dispatch.recorded import CASES
from shoal.domain.errors import NotAdmitted
from shoal.protocols.dispatch import PAIRING, PROBE

Answers = list[tuple[str, object]]


def answers(case: str) -> Answers:
    """Return the paths that were asked for, each with its answer."""
    return [
        (each["http"]["path"], json.loads(each["response"]["body"]))
        for each in CASES[case]["transcript"]
    ]


def test_an_original_coordinator_is_recognised_by_its_health() -> None:
    ((path, health),) = answers("rest-health")

    assert path == PROBE.path
    assert PROBE.is_theirs(health)


@pytest.mark.parametrize("answer", [None, [], "ok", {}, {"status": "ok"}])
def test_other_responses_are_not_recognised(answer: object) -> None:
    assert not PROBE.is_theirs(answer)


def test_every_response_to_a_claim_is_understood() -> None:
    claims = [answer for path, answer in answers("rest-trust") if path == PAIRING.path]
    said = []
    for answer in claims:
        try:
            said.append(PAIRING.user(answer))
        except NotAdmitted as error:
            said.append(str(error))

    assert said == [
        "Missing pairing_code or provider_pubkey",
        "there is no such code: ask for a new one",
        "u1",
        "the code has been used; if this worker did, it is paired",
    ]


def test_a_claim_has_the_fields_of_the_original() -> None:
    recorded = [
        json.loads(each["http"]["body"]).keys()
        for each in CASES["rest-trust"]["transcript"]
        if each["http"]["path"] == PAIRING.path and each["http"]["body"] != "{}"
    ]

    assert {frozenset(keys) for keys in recorded} == {
        frozenset(PAIRING.claim("A1B2C3", bytes(32)))
    }
