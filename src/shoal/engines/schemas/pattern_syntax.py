"""Parses regular expressions of ECMAScript, as far as grammars can express them.

Source: ECMA-262, "Patterns".  There are no flags.  Groups only group, and how much a
repetition would take first is left out: neither matters for what matches.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias

NESTING_MAX = 50  # groups within groups: llama.cpp's limit is 100
REPEAT_MAX = 2000  # repetitions of one item: llama.cpp's limit


class UnsupportedPattern(Exception):
    """The pattern cannot be translated."""


Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Code points, as inclusive ranges in order."""


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """One of some characters."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Concatenation:
    """Nodes one after the other; without any, the empty text."""

    nodes: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """One of several nodes."""

    nodes: tuple["Node", ...]


@dataclass(frozen=True, slots=True)
class Repetition:
    """A node, from ``least`` to ``most`` times; None: any number of times."""

    node: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The beginning of the text, or its end."""

    at_end: bool


Node: TypeAlias = CharacterSet | Concatenation | Alternation | Repetition | Anchor


def parse_pattern(pattern: str) -> Node:
    """Parse a pattern.  Raises UnsupportedPattern."""
    return _Parser(pattern).parse()


# Sets of characters.


def sorted_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in order; those that overlap or touch are joined."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Return the ranges with all other characters."""
    edges = [(-1, -1), *sorted_ranges((*ranges, SURROGATES)), (LAST + 1, LAST + 1)]
    return tuple((a[1] + 1, b[0] - 1) for a, b in pairwise(edges) if a[1] + 1 < b[0])


def ranges_of(characters: str) -> Ranges:
    """Return the ranges with these characters."""
    return sorted_ranges((ord(each), ord(each)) for each in characters)


LAST: Final = 0x10FFFF
SURROGATES: Final = (0xD800, 0xDFFF)
LOW_SURROGATES: Final = 0xDC00
DIGITS: Final = ((0x30, 0x39),)
WORD: Final = sorted_ranges([*DIGITS, (0x41, 0x5A), (0x61, 0x7A), *ranges_of("_")])
SPACES: Final = sorted_ranges(
    [
        *ranges_of("\t\n\v\f\r \xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff"),
        (0x2000, 0x200A),
    ]
)
CLASSES: Final = {
    **{"d": DIGITS, "w": WORD, "s": SPACES},
    **{"D": complement(DIGITS), "W": complement(WORD), "S": complement(SPACES)},
}
CONTROLS: Final = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "0": "\0"}
ANY: Final = CharacterSet(complement(()))
DOT: Final = CharacterSet(complement(ranges_of("\n\r\u2028\u2029")))


# Reading a pattern.

_NUMBERS: Final = {
    "x": re.compile("[0-9a-fA-F]{2}"),
    "u": re.compile("[0-9a-fA-F]{4}|{[0-9a-fA-F]{1,6}}"),
}


class _Parser:
    """Parses a pattern of ECMAScript, without flags."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> Node:
        node = self._alternation()
        if self._at < len(self._pattern):
            raise UnsupportedPattern("a parenthesis too many")
        return node

    def _next(self) -> str:
        """Return the next character; empty at the end."""
        return self._pattern[self._at : self._at + 1]

    def _skip(self, text: str) -> bool:
        """Skip a text, if it is next."""
        if not self._pattern.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _alternation(self) -> Node:
        nodes = [self._concatenation()]
        while self._skip("|"):
            nodes.append(self._concatenation())
        return nodes[0] if len(nodes) == 1 else Alternation(tuple(nodes))

    def _concatenation(self) -> Node:
        nodes = []
        while self._next() not in ("", "|", ")"):
            nodes.append(self._repetition(self._atom()))
        return nodes[0] if len(nodes) == 1 else Concatenation(tuple(nodes))

    def _atom(self) -> Node:
        if self._skip("("):
            return self._group()
        if self._skip("["):
            return self._class()
        if self._skip("\\"):
            return CharacterSet(self._escape(in_class=False))
        if self._next() in ("*", "+", "?"):
            raise UnsupportedPattern(f"nothing before {self._next()}")
        match character := self._take():
            case "^" | "$":
                return Anchor(character == "$")
            case ".":
                return DOT
            case _:
                return CharacterSet(ranges_of(character))

    def _take(self) -> str:
        character = self._next()
        if not character:
            raise UnsupportedPattern("it ends too early")
        self._at += 1
        return character

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > NESTING_MAX:
            raise UnsupportedPattern(f"more than {NESTING_MAX} groups within groups")
        if self._skip("?"):
            self._group_kind()
        node = self._alternation()
        if not self._skip(")"):
            raise UnsupportedPattern("a parenthesis is missing")
        self._depth -= 1
        return node

    def _group_kind(self) -> None:
        """Skip what a group is called: only its contents matter."""
        if self._skip(":"):
            return
        begin = self._at
        if not self._skip("<") or self._next() in ("=", "!"):
            raise UnsupportedPattern(
                f"no grammar for (?{self._pattern[begin : begin + 2]}"
            )
        end = self._pattern.find(">", self._at)
        if end < 0:
            raise UnsupportedPattern("a name without its end: (?<")
        self._at = end + 1

    def _class(self) -> Node:
        negated = self._skip("^")
        ranges: list[tuple[int, int]] = []
        while not self._skip("]"):
            low = self._class_item()
            if not self._pattern.startswith("-", self._at) or self._pattern.startswith(
                "-]", self._at
            ):
                ranges += low
                continue
            self._at += 1
            high = self._class_item()
            ((first, _), *more), ((last, _), *others) = low, high
            if more or others or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                raise UnsupportedPattern("a class within a range")
            if first > last:
                raise UnsupportedPattern("a range in the wrong order")
            ranges.append((first, last))
        found = sorted_ranges(ranges)
        return CharacterSet(complement(found) if negated else found)

    def _class_item(self) -> Ranges:
        if self._skip("\\"):
            return self._escape(in_class=True)
        return ranges_of(self._take())

    def _escape(self, *, in_class: bool) -> Ranges:
        letter = self._take()
        if letter in CLASSES:
            return CLASSES[letter]
        if letter in CONTROLS:
            if letter == "0" and self._next().isdecimal():
                raise UnsupportedPattern(r"\0 before a digit")
            return ranges_of(CONTROLS[letter])
        if letter == "b" and in_class:
            return ranges_of("\b")
        if letter in ("x", "u"):
            return self._code_point(letter)
        if letter == "c" and self._next().isascii() and self._next().isalpha():
            return ((ord(self._take()) % 32,) * 2,)
        if letter.isascii() and letter.isalnum():
            raise UnsupportedPattern(f"no grammar for \\{letter}")
        return ranges_of(letter)

    def _code_point(self, letter: str) -> Ranges:
        code = self._number(letter)
        if SURROGATES[0] <= code < LOW_SURROGATES and self._skip("\\u"):
            low = self._number("u") - LOW_SURROGATES
            code = 0x10000 + ((code - SURROGATES[0]) << 10) + low
        if code > LAST or SURROGATES[0] <= code <= SURROGATES[1]:
            raise UnsupportedPattern(f"\\{letter} of no character")
        return ((code, code),)

    def _number(self, letter: str) -> int:
        """Read the number of a character, in hexadecimal digits."""
        found = _NUMBERS[letter].match(self._pattern, self._at)
        if found is None:
            raise UnsupportedPattern(f"\\{letter} without a number")
        self._at = found.end()
        return int(found[0].strip("{}"), 16)

    def _repetition(self, node: Node) -> Node:
        begin = self._at
        bounds = self._bounds()
        if bounds is None:
            self._at = begin
            return node
        self._skip("?")  # how much it would take makes no difference
        if isinstance(node, Anchor):
            raise UnsupportedPattern("a repeated anchor")
        least, most = bounds
        if max(least, most or 0) > REPEAT_MAX:
            raise UnsupportedPattern(f"more than {REPEAT_MAX} repetitions")
        if most is not None and most < least:
            raise UnsupportedPattern("repetitions in the wrong order")
        return Repetition(node, least, most)

    def _bounds(self) -> tuple[int, int | None] | None:
        """Read how often the item before is repeated; None: it is not."""
        for sign, bounds in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self._skip(sign):
                return bounds
        if not self._skip("{"):
            return None
        text, closed, _ = self._pattern[self._at :].partition("}")
        least, comma, most = text.partition(",")
        if not closed or not _is_count(least) or not (most == "" or _is_count(most)):
            if _is_count(most):
                raise UnsupportedPattern(f"{{{text}}}")  # programs differ about it
            return None
        self._at += len(text) + 1
        if not comma:
            return int(least), int(least)
        return int(least), int(most) if most else None


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10
