import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.domain.credentials import (
    NAME_PATTERN,
    REPORTED_TOKENS_MAX,
    JoinToken,
    Key,
    Scope,
    digest_of,
    estimated_tokens,
    may_offer,
    partial_usage,
    permitted_priority,
    tokens_to_read,
    usage_of,
    was_unusable_before,
    with_fingerprint,
    without_fingerprint,
)
from shoal.domain.errors import Forbidden
from shoal.domain.job import Priority
from shoal.domain.outcome import Choice, Outcome, Usage
from shoal.domain.work import Chat, Embedding

FINGERPRINT = hashlib.sha256(b"certificate").digest()
TOKEN = JoinToken("token_1", "lab", digest_of("jt"), 0.0)
KEY = Key("key_1", "alice", digest_of("sk"), "", Scope.USE, 0.0)


def test_scope_includes_lower_scopes() -> None:
    covered = {scope: {each for each in Scope if scope.covers(each)} for scope in Scope}

    assert covered == {
        Scope.READ: {Scope.READ},
        Scope.USE: {Scope.READ, Scope.USE},
        Scope.MONITOR: {Scope.READ, Scope.MONITOR},
        Scope.ADMIN: {*Scope},
    }


@pytest.mark.parametrize("name", ["a", "Alice", "ci-7.2_x", "me@example.org", "9" * 64])
def test_valid_name_is_accepted(name: str) -> None:
    assert NAME_PATTERN.fullmatch(name)


@pytest.mark.parametrize(
    "name", ["", "-a", ".a", "a b", "a/b", "a\n", "é", "9" * 65, "a\0", "\u202ea", "@"]
)
def test_ambiguous_name_is_rejected(name: str) -> None:
    assert not NAME_PATTERN.fullmatch(name)


@given(st.text())
def test_any_text_has_a_digest(secret: str) -> None:
    assert len(digest_of(secret)) == 32


def test_token_without_a_certificate_is_unchanged() -> None:
    assert with_fingerprint("jt-1", None) == "jt-1"
    assert without_fingerprint("jt-1") == ("jt-1", None)


@given(st.text(), st.binary(min_size=32, max_size=32))
def test_token_and_certificate_round_trip(token: str, digest: bytes) -> None:
    assert without_fingerprint(with_fingerprint(token, digest)) == (token, digest)


def test_token_is_safe_in_urls_and_on_command_lines() -> None:
    shown = with_fingerprint("jt-0a", FINGERPRINT)

    assert shown.startswith("jt-0a.sha256-")
    assert len(shown) == len("jt-0a.sha256-") + 43
    assert set(shown[5:]) <= set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."
    )


@pytest.mark.parametrize(
    "token",
    [
        "eyJh.eyJz.SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV_adQssw5c",  # a JWT
        "a.sha256-short",
        "a.sha256-" + "é" * 43,
        ".sha256-",
        "",
    ],
)
def test_other_tokens_are_unchanged(token: str) -> None:
    assert without_fingerprint(token) == (token, None)


@pytest.mark.parametrize(
    ("patterns", "models", "may"),
    [
        ((), {"anything"}, True),
        (("llama*", "b"), {"llama3:8b", "b"}, True),
        (("llama*",), {"llama3", "qwen"}, False),
        (("LLAMA*",), {"llama3"}, False),
        (("*/tiny-[0-9]",), {"family/tiny-1"}, True),
        (("[",), {"["}, True),
    ],
)
def test_token_allows_models_matching_its_patterns(
    patterns: tuple[str, ...], models: set[str], may: bool
) -> None:
    assert may_offer(patterns, models) == may


def test_ended_credential_is_useless() -> None:
    for credential in (KEY, TOKEN):
        assert not was_unusable_before(credential, 1e12)
        assert was_unusable_before(replace(credential, revoked_at=5.0), 6.0)
        assert not was_unusable_before(replace(credential, revoked_at=5.0), 5.0)
        assert was_unusable_before(replace(credential, expires_at=5.0), 6.0)


def test_expired_token_readmits_its_workers() -> None:
    token = replace(TOKEN, expires_at=5.0, uses_max=1)

    assert was_unusable_before(token, 6.0)
    assert not was_unusable_before(replace(token, workers=frozenset({"w"})), 6.0)
    assert was_unusable_before(replace(token, revoked_at=5.0), 6.0)


@given(st.text(max_size=40))
def test_token_estimate_is_four_bytes(text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))

    assert size / 4 <= estimated_tokens(text) < size / 4 + 1


CHAT = Chat("m", ({"role": "user", "content": "12345678"},))
INPUTS = Embedding("m", ("a", "b", "c"))


def test_each_input_of_an_embedding_is_read() -> None:
    assert tokens_to_read(INPUTS) == 3


@pytest.mark.parametrize(
    ("reported", "counted"),
    [
        (Usage(7, 3), Usage(7, 3)),
        (Usage(-1, 3), Usage(0, 3)),
        (Usage(7, -1), Usage(7, 0)),
        (Usage(2**70, 2**70), Usage(REPORTED_TOKENS_MAX, REPORTED_TOKENS_MAX)),
    ],
)
def test_reported_usage_counts_within_bounds(reported: Usage, counted: Usage) -> None:
    assert usage_of(CHAT, Outcome("text", usage=reported)) == counted


def test_usage_that_nobody_reported_is_estimated() -> None:
    read = tokens_to_read(CHAT)
    choice = Choice({"text": "x" * 30})

    assert usage_of(CHAT, Outcome("12345")) == Usage(read, 2)
    assert usage_of(INPUTS, Outcome("[0.1, 0.2]")) == Usage(3, 0)
    longer = usage_of(CHAT, Outcome("12345", choices=(choice,)))
    assert longer.completion_tokens > 2
    assert partial_usage(read, 0) is None
    assert partial_usage(read, 5) == Usage(read, 2)


@pytest.mark.parametrize(
    ("highest", "wanted", "expected"),
    [
        (Priority.HIGH, Priority.HIGH, Priority.HIGH),
        (Priority.HIGH, None, Priority.NORMAL),
        (Priority.NORMAL, Priority.HIGH, None),
        (Priority.NORMAL, Priority.LOW, Priority.LOW),
        (Priority.NORMAL, None, Priority.NORMAL),
        (Priority.LOW, None, Priority.LOW),
        (Priority.LOW, Priority.NORMAL, None),
    ],
)
def test_key_limits_the_priority_of_its_jobs(
    highest: Priority, wanted: Priority | None, expected: Priority | None
) -> None:
    key = replace(KEY, priority_max=highest)
    if expected is not None:
        assert permitted_priority(key, wanted) is expected
        return

    with pytest.raises(Forbidden, match=f"alice .* {highest.name.lower()} at most"):
        permitted_priority(key, wanted)
