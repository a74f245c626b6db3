import secrets
import uuid

import pytest

from shoal.domain.settings import (
    BITS_MIN,
    PUBLISHED,
    SIZE_MAX,
    estimated_bits,
    is_guessable,
    why_guessable,
)


@pytest.mark.parametrize(
    "secret",
    [
        "",
        "x",
        "hunter2",
        "sk-shoal-1234",
        "a" * 200,
        "0123456789" * 20,
        "abcdefghijklmnopqrstuvwxyz",
        "password" * 10,
        "changeme-change-me-CHANGE_ME",
        "correct-horse-battery-staple",
        "abcabcabcabcabcabcabcabcabcabcabcabc",
        "c4f87f3c0bb453b5",  # 64 bits
        "7" * SIZE_MAX + "c4f87f3c0bb453b5b38c",  # only the beginning is looked at
    ],
)
def test_what_a_person_types_is_guessable(secret: str) -> None:
    assert is_guessable(secret)


@pytest.mark.parametrize("secret", sorted(PUBLISHED))
def test_published_secret_is_guessable(secret: str) -> None:
    assert why_guessable(secret.upper()) == "it is a published example"


def test_generated_secrets_are_not_guessable() -> None:
    for _ in range(100):
        for secret in (
            f"sk-shoal-{secrets.token_hex(20)}",
            f"jt-{secrets.token_hex(20)}",
            secrets.token_hex(16).upper(),
            secrets.token_urlsafe(16),
            str(uuid.uuid4()),
        ):
            assert why_guessable(secret) is None, secret


def test_bits_are_those_of_the_alphabet_without_repeats() -> None:
    assert estimated_bits("73901852") == pytest.approx(8 * 3.32, rel=0.01)
    assert estimated_bits("7390185264") == pytest.approx(10 * 3.32, rel=0.01)
    assert estimated_bits("e51b") == 4 * 4
    assert estimated_bits("E5-1B") == pytest.approx(5 * 4.09, rel=0.01)
    assert estimated_bits("qmxp" * 9) == pytest.approx(6 * 4.7, rel=0.01)
    assert estimated_bits("1234") == estimated_bits("78")
    assert estimated_bits("sk-e51b") == estimated_bits("e51b")
    assert estimated_bits("sk-sk-e51b") > estimated_bits("e51b")
    assert estimated_bits("") == 0.0
    assert estimated_bits("987") == estimated_bits("97")  # runs go down as well
    assert estimated_bits("77") < estimated_bits("777x7") == estimated_bits("77x7")
    # Digits of another script are no ten that a guesser tries.
    assert estimated_bits("\u0661e51b") == pytest.approx(5 * 4.09, rel=0.01)


def test_as_many_bits_as_are_needed_are_enough() -> None:
    assert estimated_bits("c4f87f3c0bb453b5b38c") == BITS_MIN
    assert not is_guessable("c4f87f3c0bb453b5b38c")


def test_reason_names_the_bits() -> None:
    assert why_guessable("reef") == f"it has about 19 bits, and {BITS_MIN} are needed"
