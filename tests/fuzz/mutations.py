"""Makes bad input out of good: by bytes, and by values of JSON or MessagePack in it."""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

SEPARATOR = b"\0\n"  # between the messages of one input

SIZE_MAX = 64 << 10  # bytes of an input
PACKED_AT = (
    0,
    3,
)  # where MessagePack begins in a part: after what a target reads first
STEPS = (1, 1, 1, 2, 4)  # changes from good input to bad

ODD: tuple[Any, ...] = (
    *(None, True, "", [], {}, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**64)),
    *(10**400, 1.5, -0.0, 1e308, 5e-324, 100.0, 10**18, "0", "*", "*task", "..", "/"),
    *("\ud800", "\0", "\x1b[2J", "\u202e", "x" * 300, "x" * 5000, "e30=", "AQ=="),
    *([[]], {"_0": {}}, {"": None}, ["x"] * 50, {"shoal": {"version": 1}}, ["\udfff"]),
)
"""Values that somebody may not have thought of."""

TOKENS = (
    *(b"null", b"NaN", b"Infinity", b"1e999", b"-", b"1" * 400, b"1" * 5000, b'"'),
    *(b"\\u0000", b"\\ud800", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"{}"),
    *(b'{"_0":', b"[" * 200, b'{"a":' * 200, b"\xff\xff\xff\xff", b"\0\0\0\0", b","),
    *(b"\x7f\xff\xff\xff", b"\x01" * 32, b"\x11" * 97, b"\r\n", b"\0\n"),
)
"""Bytes of the same kind."""


def mutated(random: Random, seeds: Sequence[bytes]) -> bytes:
    """Return an input that is like one of the seeds, in a few places not quite."""
    data = random.choice(seeds)
    changes = random.choice((_CHANGES, _OF_VALUES))
    for _ in range(random.choice(STEPS)):
        data = random.choice(changes)(random, data, seeds)[:SIZE_MAX]
    return data


# How an input is changed.  Parts of it that are JSON are between separators.


def _by_value(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    lines = data.split(SEPARATOR)
    number = random.randrange(len(lines))
    start = lines[number].find(b"{")
    try:
        tree = json.loads(lines[number][start:])
        lines[number] = lines[number][:start] + _written(_changed(random, tree))
    except (ValueError, RecursionError):
        return _by_packed_value(random, data, seeds)
    return SEPARATOR.join(lines)


def _by_packed_value(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    lines = data.split(SEPARATOR)
    number = random.randrange(len(lines))
    line = lines[number]
    for start in PACKED_AT:
        try:
            tree = msgspec.msgpack.decode(line[start:])
            if isinstance(tree, dict | list):
                packed = msgspec.msgpack.encode(_changed(random, tree))
                lines[number] = line[:start] + packed
                return SEPARATOR.join(lines)
        except (ValueError, OverflowError, RecursionError, TypeError):
            continue
    return _flip(random, data, seeds)


def _changed(random: Random, tree: Any) -> Any:
    """Return the tree with one value that is another, gone, or there twice."""
    if isinstance(tree, dict) and tree and random.random() < 0.9:
        key = random.choice([*tree])
        match random.randrange(12):
            case 0:
                return {name: value for name, value in tree.items() if name != key}
            case 1:
                return tree | {random.choice(("", "_0", "shoal", key + "x")): tree[key]}
            case _:
                return tree | {key: _changed(random, tree[key])}
    if isinstance(tree, list) and tree and random.random() < 0.8:
        place = random.randrange(len(tree))
        if random.randrange(4) == 0:
            return tree + tree[place:] * random.randint(1, 3)
        return [*tree[:place], _changed(random, tree[place]), *tree[place + 1 :]]
    alike = [odd for odd in ODD if type(odd) is type(tree)]
    return random.choice(alike if alike and random.random() < 0.8 else ODD)


def _written(tree: Any) -> bytes:
    return json.dumps(tree).encode()


def _flip(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    if not data:
        return bytes([random.randrange(256)])
    place = random.randrange(len(data))
    return data[:place] + bytes([random.randrange(256)]) + data[place + 1 :]


def _cut(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    start, end = sorted(random.choices(range(len(data) + 1), k=2))
    return data[:start] + data[end:]


def _repeat(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    start, end = sorted(random.choices(range(len(data) + 1), k=2))
    return data[:end] + data[start:end] * random.randint(1, 8) + data[end:]


def _insert(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    place = random.randint(0, len(data))
    return data[:place] + random.choice(TOKENS) + data[place:]


def _splice(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    other = random.choice(seeds)
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


def _follow(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    return data + SEPARATOR + random.choice(seeds)


Change = Callable[[Random, bytes, Sequence[bytes]], bytes]

_CHANGES: tuple[Change, ...] = (
    *(_by_value, _flip, _cut, _repeat, _insert, _splice, _follow),
)
_OF_VALUES: tuple[Change, ...] = (_by_value, _by_value, _by_value, _follow)
