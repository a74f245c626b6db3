"""Patterns of schemas, as llama.cpp gets them: about JSON text."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.engines.schemas.pattern_syntax import (
    NESTING_MAX,
    REPEAT_MAX,
    UnsupportedPattern,
)
from shoal.engines.schemas.patterns import PATTERN_MAX, translate_pattern
from shoal.engines.schemas.plain_schema import FORMAT_PATTERNS


def json_text(text: str) -> str:
    """Return the text as it is within the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def lets_through(pattern: str, text: str) -> bool:
    """Say whether a grammar of the pattern lets a text through."""
    found: re.Match[str] | None = re.fullmatch(
        translate_pattern(pattern), json_text(text)
    )
    return found is not None


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (r"^\d{3}$", ["123"], ["12", "1234", "a12", "١٢٣"]),
        (r"^\w+$", ["aZ_9"], ["", "a b", "é"]),
        (r"^\s$", [" ", "\t", "\n", "\u3000"], ["", "a", "  "]),
        (r"^\D\W\S$", ["a-é"], ["1-a", "aaa", "a- "]),
        (r"\d", ["1", "a1", "1a", "a\n1"], ["", "a"]),
        (r"^a", ["a", "ab"], ["ba"]),
        (r"a$", ["a", "ba"], ["ab"]),
        (r"^a|b$", ["a", "ax", "xb"], ["xa", "bx"]),
        (r"^(a|b)$", ["a", "b"], ["ab", "xb"]),
        (r"(^a$|^b$)", ["a", "b"], ["ab"]),
        (r"^(a|)b$", ["ab", "b"], ["a"]),
        (r"^$", [""], ["a"]),
        ("", ["", "a"], []),
        (r"^.$", ["a", '"', "\\", "é", "😀", "\t"], ["", "\n", "aa"]),
        (r'^"\\$', ['"\\'], ['"', "\\"]),
        (r"^[^a-y]$", ["z", '"', "😀", "\n"], ["a", "y"]),
        (r"^[\w.-]+$", ["a.b-c"], ["a b"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^[^]$", ["\n", "a"], [""]),
        (r"^\x41\u0042\u{43}\cJ\/\-\.$", ["ABC\n/-."], ["ABC"]),
        (r"^[\ud83d\ude00-\ud83d\ude02]$", ["😁"], ["😃"]),
        (r"^\u0001$", ["\x01"], ["\x02"]),
        (r"^(?:a)(?<b>b)$", ["ab"], ["a"]),
        (r"^a*?b+?c??d{1,}?$", ["abbcd", "bd"], ["ac"]),
        (r"^a{2}b{2,}c{0,2}$", ["aabb", "aabbbcc"], ["abb", "aabbccc"]),
        (r"^a{x}$", ["a{x}"], ["a"]),
        (r"^a{0}$", [""], ["a"]),
        (r"^(a?|b)*c$", ["c", "aabbc"], ["d"]),
    ],
)
def test_translated_pattern_lets_the_same_texts_through(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    for text in matching:
        assert lets_through(pattern, text), text
    for text in others:
        assert not lets_through(pattern, text), text


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"^(?=a)a$", r"\(\?=a"),
        (r"^(?!a)b$", r"\(\?!a"),
        (r"^(?<=a)b$", r"\(\?<="),
        (r"^(?<!a)b$", r"\(\?<!"),
        (r"(?i)a", r"\(\?i\)"),
        (r"^(a)\1$", r"\\1"),
        (r"^\bword\b$", r"\\b"),
        (r"^\p{L}$", r"\\p"),
        (r"^\k<a>$", r"\\k"),
        (r"^a^b$", "within"),
        (r"^(a$|b)c$", "within"),
        (r"^[]$", "without characters"),
        (r"^[b-a]$", "wrong order"),
        (r"^[\d-x]$", "within a range"),
        (r"^a{2,1}$", "wrong order"),
        (r"^a{,3}$", r"\{,3}"),
        (rf"^a{{{REPEAT_MAX + 1}}}$", "repetitions"),
        (r"^^*$", "repeated anchor"),
        (r"^(*)$", "nothing before"),
        (r"^(a$", "missing"),
        (r"^a)$", "too many"),
        (r"^[a$", "too early"),
        ("\\", "too early"),
        (r"^\x4$", r"\\x"),
        (r"^\u{110000}$", "no character"),
        (r"^\ud800$", "no character"),
        (r"^\01$", "digit"),
        (r"^(?<a$", r"\(\?<"),
        ("(" * (NESTING_MAX + 1), "within groups"),
        ("a" * (PATTERN_MAX + 1), "more than"),
    ],
)
def test_pattern_without_a_grammar_is_refused_with_the_reason(
    pattern: str, reason: str
) -> None:
    with pytest.raises(UnsupportedPattern, match=reason):
        translate_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "least", "most", "translated"),
    [
        ("^[a-z]+$", 0, None, "^[a-z]+$"),
        ("^[a-z]+$", 2, 5, "^[a-z]{2,5}$"),
        ("^[a-z]{3}$", 1, 3, "^[a-z]{3,3}$"),
        ("^x[0-9]*y$", 0, 5, "^[x][0-9]{0,3}[y]$"),
        ("^x[0-9]{1,9}$", 4, None, "^[x][0-9]{3,9}$"),
        ("^(ab|cd)$", 2, 2, "^([a][b]|[c][d])$"),
        ("^(a{2})*$", 0, None, "^([a]{2,2})*$"),
    ],
)
def test_length_limits_the_only_part_that_varies(
    pattern: str, least: int, most: int | None, translated: str
) -> None:
    assert translate_pattern(pattern, least, most) == translated


@pytest.mark.parametrize(
    ("pattern", "least", "most"),
    [
        ("^a*b*$", 0, 3),
        ("^(ab)*$", 0, 3),
        ("^(a|bc)$", 2, None),
        ("^a{3}$", 4, None),
        ("^a{3}b*$", 0, 2),
        ("a", 0, 3),
        ("^a*$", 0, REPEAT_MAX + 1),
    ],
)
def test_other_lengths_are_refused(pattern: str, least: int, most: int | None) -> None:
    with pytest.raises(UnsupportedPattern):
        translate_pattern(pattern, least, most)


characters = st.sampled_from(
    ["a", "b", "0", "_", " ", "\\.", "\\d", "\\W", "[^b\\s]", "."]
)
patterns = st.recursive(
    characters,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda p: f"({'|'.join(p)})")
        | st.tuples(inner, st.sampled_from("*+?")).map(lambda p: f"(?:{p[0]}){p[1]}")
        | inner.map(lambda p: f"(?:{p}){{1,3}}")
    ),
    max_leaves=5,
)


@given(patterns, st.booleans(), st.booleans(), st.text('ab0_ ."\\\n\té', max_size=5))
def test_a_text_is_let_through_if_it_matches(
    pattern: str, at_begin: bool, at_end: bool, text: str
) -> None:
    pattern = f"{'^' * at_begin}(?:{pattern}){'$' * at_end}"

    # The end in ECMAScript is not before a last line end, and its classes are ASCII.
    found = re.search(pattern.replace("$", r"\Z"), text, re.ASCII)

    assert lets_through(pattern, text) == (found is not None)


@pytest.mark.parametrize(
    ("name", "texts", "others"),
    [
        ("email", ["a.b+c@example.com"], ["a", "a@b", "@b.c", "a b@c.d"]),
        ("hostname", ["a", "a-b.example"], ["-a", "a..b", "a_b"]),
        ("ipv4", ["0.0.0.0", "255.10.1.99"], ["256.0.0.1", "01.0.0.1", "1.1.1"]),
        (
            "ipv6",
            ["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
            ["1:2:3:4:5:6:7", "1::2::3", ":1", "12345::"],
        ),
        ("uri", ["https://a.b/c?d=e#f", "urn:a:b", "a:%20"], ["a", "a:", "a:b c"]),
        ("duration", ["P1D", "PT1H30M", "P1Y2M3DT4S", "P2W"], ["P", "PT", "1D"]),
    ],
)
def test_formats_are_patterns(name: str, texts: list[str], others: list[str]) -> None:
    for text in texts:
        assert lets_through(FORMAT_PATTERNS[name], text), text
    for text in others:
        assert not lets_through(FORMAT_PATTERNS[name], text), text
