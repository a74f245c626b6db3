"""The bytes of answers that receipts cover."""

import json

import pytest

from shoal.domain.answer_assembly import assemble
from shoal.domain.outcome import Delta, Outcome
from shoal.domain.work import JSON, Chat
from shoal.ledger.receipts import output_of


@pytest.mark.parametrize("number", [2**53, -(2**53), 10**18, 2**64, 10**400])
def test_integers_without_a_canonical_form_become_strings(number: int) -> None:
    fields: dict[str, JSON] = {"odd": number, "nested": [{"odd": number}]}
    outcome = assemble([Delta(0, fields, {"odd": number}, "stop")], "stop", None)

    (choice,) = json.loads(output_of(Chat("m", ()), outcome))["choices"]

    assert choice["fields"]["odd"] == str(number)
    assert choice["fields"]["nested"] == [{"odd": str(number)}]
    assert choice["logprobs"] == {"odd": str(number)}


def test_canonical_integers_stay_numbers() -> None:
    fields = {"odd": 2**53 - 1, "flag": True}
    outcome = assemble([Delta(0, fields)], "stop", None)

    (choice,) = json.loads(output_of(Chat("m", ()), outcome))["choices"]

    assert choice["fields"]["odd"] == 2**53 - 1
    assert choice["fields"]["flag"] is True


def test_text_of_the_worker_itself_is_kept_as_it_is() -> None:
    written = '{"text": "hi"}'  # not canonical

    assert output_of(Chat("m", ()), Outcome("hi", output=written)) == written.encode()


def test_answer_that_is_only_text_has_no_choices() -> None:
    assert output_of(Chat("m", ()), Outcome("hi")) == b'{"model":"m","text":"hi"}'
