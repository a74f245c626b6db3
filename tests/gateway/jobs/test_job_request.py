"""Decoding of commits, and errors of invalid ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.builders import PRICES
from shoal.domain.errors import InvalidRequest
from shoal.domain.job import JobTerms, Policy, Privacy, Webhook
from shoal.domain.json_limits import NESTING_MAX
from shoal.domain.work import ANY_MODEL, Chat, Task
from shoal.gateway.http.body import BODY_MAX
from shoal.gateway.jobs.job_request import (
    INVALID_TYPE,
    MISSING,
    REF_MAX,
    URL_MAX,
    USER_MAX,
    VALUES_MAX,
    decode_commit,
)
from shoal.protocols.dispatch.messages import MESSAGE_MAX

DOCS = Path(__file__).parents[3] / "docs"
TASK = '{"task_type":"classify","input":"great"}'
HOOK = {"url": "https://example.org/hook", "secret": "0123456789abcdef"}


def read(
    body: bytes | str, policy: Policy = Policy.CHEAP
) -> tuple[Chat | Task, JobTerms]:
    data = body.encode() if isinstance(body, str) else body
    return decode_commit(data, policy, PRICES)


def task(payload: str = TASK, **fields: Any) -> str:
    """Encode a commit of a task with that text as its payload."""
    rest = json.dumps({"job_type": "TASK", "user_id": "u1"} | fields)
    return f'{rest[:-1]},"payload":{payload}}}'


def inference(**payload: Any) -> str:
    return json.dumps({"job_type": "LLM_INFER", "user_id": "u1", "payload": payload})


def test_task_is_decoded() -> None:
    work, terms = read(task())

    assert work == Task("classify", json.loads(TASK))
    assert terms == JobTerms(
        Policy.CHEAP, Privacy.PUBLIC, "u1", PRICES.cheap_task, form=TASK, detached=True
    )


def test_inference_becomes_a_chat_of_one_message() -> None:
    work, terms = read(inference(prompt="hi", max_tokens=8.0), Policy.FAST)

    assert work == Chat(ANY_MODEL, ({"role": "user", "content": "hi"},), 8)
    assert terms.price == PRICES.fast_inference


def test_inference_without_a_limit_has_256_tokens() -> None:
    (work, terms) = read(inference(prompt="hi"))

    assert isinstance(work, Chat)
    assert work.max_tokens == 256
    assert "max_tokens" not in terms.form


def test_inference_may_name_a_model() -> None:
    assert read(inference(prompt="hi", model="qwen"))[0].model == "qwen"
    others: tuple[Any, ...] = (None, "", 5, {})
    for other in others:
        assert read(inference(prompt="hi", model=other))[0].model == ANY_MODEL


def test_terms_are_decoded() -> None:
    _, terms = read(
        task(privacy_class="PRIVATE", payment_ref="tx", webhook=HOOK), Policy.FAST
    )

    assert terms.policy is Policy.FAST
    assert terms.privacy is Privacy.PRIVATE
    assert terms.payment_ref == "tx"
    assert terms.webhook == Webhook(HOOK["url"], HOOK["secret"])


@pytest.mark.parametrize(
    "payload",
    [
        '{ "b" : 1.50, "a":1e2 , "1":-0, "big":123456789012345678901234567890}',
        '"str"',
        "[1]",
        "[]",
        "{}",
        "7",
        "true",
        '{"input":"\\u00e9\\n\\/","a":1,"a":2}',
        '{"input":"é 日 \U0001f9a6 \u2028"}',
    ],
)
def test_payload_of_a_task_is_unchanged(payload: str) -> None:
    work, terms = read(task(payload))

    assert terms.form == payload
    assert isinstance(work, Task)
    assert work.payload == json.loads(payload)


@pytest.mark.parametrize(
    ("given", "taken"), [('"u"', "u"), ("42", "42"), ("-1.50", "-1.50"), ('"é"', "é")]
)
def test_user_may_be_a_number(given: str, taken: str) -> None:
    body = f'{{"job_type":"TASK","user_id":{given},"payload":{TASK}}}'

    assert read(body)[1].user == taken


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        "[]",
        " [1]",
        task("null"),
        task("false"),
        task("0"),
        task("-0.0"),
        task('""'),
        task(job_type=""),
        task(job_type=None),
        task(user_id=""),
        task(user_id=None),
        task(user_id=0),
        task(user_id=False),
        '{"job_type":"TASK","user_id":"u1"}',
        f'{{"user_id":"u1","payload":{TASK}}}',
        f'{{"job_type":"TASK","payload":{TASK}}}',
    ],
)
def test_falsy_javascript_values_count_as_missing(body: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)

    assert str(caught.value) == MISSING


@pytest.mark.parametrize("name", ["X", "task", "TASK ", 5, True, ["TASK"], {"a": 1}])
def test_other_job_types_are_rejected(name: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(task(job_type=name))

    assert str(caught.value) == INVALID_TYPE


DEEP = "[" * (NESTING_MAX + 2) + "]" * (NESTING_MAX + 2)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("{", "the body is not JSON"),
        ("5", "the body: expected `object`"),
        ('"x"', "the body: expected `object`"),
        (b"\xff{}", "the body is not UTF-8"),
        (task(user_id={"a": 1}), "user_id: expected"),
        (task(user_id=["u"]), "user_id: expected"),
        (task(user_id=True), "user_id: expected"),
        (task(user_id="u" * (USER_MAX + 1)), "user_id: more than 256 characters"),
        (task("1e400"), "payload: number out of range"),
        (task('{"a":1e400}'), "number out of range"),
        (task("{a:1}"), "the body is not JSON"),
        (task('"\\x"'), "the body is not JSON"),
        (task("NaN"), "the body is not JSON"),
        (task("9" * 5000), "payload: integer value out of range"),
        (task(DEEP), "payload: nested more than 100 deep"),
        (task("[" * 100_000 + "]" * 100_000), "the body is nested too deeply"),
        (task(f"[{'0,' * VALUES_MAX}0,0]"), "payload: more than 200000 values"),
        (task(privacy_class="private"), "expected PUBLIC or PRIVATE, got 'private'"),
        (task(privacy_class=""), "expected PUBLIC or PRIVATE, got ''"),
        (task(privacy_class=1), "privacy_class: expected"),
        (task(payment_ref=5), "payment_ref: expected"),
        (task(payment_ref="x" * (REF_MAX + 1)), "payment_ref: expected"),
        (inference(), "payload.prompt: required, but missing"),
        (inference(prompt=5), "payload.prompt: expected `str`"),
        (inference(prompt=None), "payload.prompt: expected `str`"),
        (inference(prompt="x", max_tokens=0), "payload.max_tokens: expected"),
        (inference(prompt="x", max_tokens="8"), "payload.max_tokens: expected"),
        (inference(prompt="x", max_tokens=0.5), "payload.max_tokens: expected"),
        (inference(prompt="x", max_tokens=2**31), "payload.max_tokens: expected"),
        (inference(prompt="x", model="m" * 257), "payload.model: more than 256"),
        (
            '{"job_type":"LLM_INFER","user_id":"u","payload":[1]}',
            "payload: expected `object`",
        ),
    ],
)
def test_error_names_the_problem(body: str | bytes, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body)

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        ("x", "webhook: expected"),
        ({}, "webhook.url: required"),
        ({"url": "https://x.org"}, "webhook.secret: required"),
        (HOOK | {"secret": "short"}, "webhook.secret: expected"),
        (HOOK | {"secret": "x" * 257}, "webhook.secret: expected"),
        (HOOK | {"secret": "whsec_!!!!!!!!!!!!"}, "webhook.secret: after whsec_"),
        (HOOK | {"url": "ftp://x.org"}, "webhook.url: expected an address"),
        (HOOK | {"url": "x.org/hook"}, "webhook.url: expected an address"),
        (HOOK | {"url": "https://x.org/a b"}, "webhook.url: expected an address"),
        (HOOK | {"url": "https:///hook"}, "webhook.url: expected an address"),
        (HOOK | {"url": "https://"}, "webhook.url: expected an address"),
        (HOOK | {"url": "https://[::1"}, "webhook.url: expected an address"),
        (HOOK | {"url": "https://x:99999/"}, "webhook.url: expected an address"),
        (HOOK | {"url": "https://x.org/\n"}, "webhook.url: expected an address"),
        (HOOK | {"url": "https://é.org/"}, "webhook.url: expected an address"),
        (HOOK | {"url": "https://me:pw@x.org/"}, "webhook.url: leave out the user"),
        (HOOK | {"url": "https://x.org/" + "x" * URL_MAX}, "webhook.url: expected"),
        (HOOK | {"other": 1}, "webhook"),
    ],
)
def test_invalid_webhook_is_rejected(hook: Any, said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(task(webhook=hook))

    assert said in str(caught.value)


def test_text_with_commas_is_one_value() -> None:
    payload = json.dumps({"input": ',"' * (2 * VALUES_MAX)})

    assert read(task(payload))[1].form == payload


def test_surrogates_are_replaced() -> None:
    work, terms = read(task('{"task_type":"x\\ud83d","input":""}'))

    assert isinstance(work, Task)
    assert work.name == "x\ufffd"
    assert json.loads(terms.form)["task_type"] == "x\ufffd"


def test_accepted_job_fits_into_a_message() -> None:
    assert BODY_MAX < MESSAGE_MAX


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_body_causes_an_internal_error(body: bytes) -> None:
    try:
        read(body)
    except InvalidRequest as error:
        assert str(error)  # noqa: PT017  # most are no good, some are


JSONS = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(JSONS, JSONS, JSONS, JSONS, JSONS)
def test_no_field_causes_an_internal_error(
    kind: Any, payload: Any, user: Any, privacy: Any, hook: Any
) -> None:
    fields = {"job_type": kind, "payload": payload, "user_id": user}
    for more in ({}, {"job_type": "TASK"}, {"job_type": "LLM_INFER"}):
        for rest in ({}, {"privacy_class": privacy}, {"webhook": hook}):
            try:
                read(json.dumps(fields | more | rest))
            except InvalidRequest as error:
                assert str(error)  # noqa: PT017  # most are no good, some are


def test_bodies_in_the_pages_are_accepted() -> None:
    texts = [
        each.read_text() for each in (DOCS.parent / "README.md", *DOCS.glob("*.md"))
    ]
    bodies = [
        body
        for text in texts
        for body in re.findall(r"""\{"job_type": [^`']*\}(?=[`'\n])""", text)
    ]

    assert len(bodies) >= 3
    for body in bodies:
        read(body)
