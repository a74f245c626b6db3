"""Translates the patterns of JSON schemas to what llama.cpp makes grammars of.

A grammar is about JSON text, where some characters of a string are escaped, so the
translated pattern is about that text.  It is anchored at both ends, and consists of
groups, classes of characters, ``|`` and repetitions.  What it lets through matches the
given pattern; control characters that JSON has no short escape for are let through only
where the pattern has nothing else.

Sources: JSON Schema, "Regular Expressions"; RFC 8259, section 7; llama.cpp's
``common/json-schema-to-grammar.cpp``.
"""

from typing import Final

from shoal.engines.schemas.pattern_syntax import (
    ANY,
    REPEAT_MAX,
    Alternation,
    Anchor,
    CharacterSet,
    Concatenation,
    Node,
    Ranges,
    Repetition,
    UnsupportedPattern,
    complement,
    parse_pattern,
    ranges_of,
    sorted_ranges,
)

PATTERN_MAX = 10_000  # characters


def translate_pattern(pattern: str, least: int = 0, most: int | None = None) -> str:
    """Return the pattern of the JSON text of strings that match another pattern.

    They have from ``least`` to ``most`` characters.

    Raises UnsupportedPattern.
    """
    if len(pattern) > PATTERN_MAX:
        raise UnsupportedPattern(f"more than {PATTERN_MAX} characters")
    node = _limited(_anchored(parse_pattern(pattern)), least, most)
    return f"^{_written(node)}$"


# What the pattern means.


def _anchored(node: Node) -> Node:
    """Return a node for the whole text: anything may be where no anchor is.

    Raises UnsupportedPattern for anchors elsewhere than around a whole alternative.
    """
    if isinstance(node, Alternation):
        return Alternation(tuple(map(_anchored, node.nodes)))
    nodes = _parts(node)
    anything = Repetition(ANY, 0, None)
    if nodes and nodes[0] == Anchor(at_end=False):
        nodes[0] = Concatenation(())
    else:
        nodes.insert(0, anything)
    if nodes[-1] == Anchor(at_end=True):
        nodes.pop()
    else:
        nodes.append(anything)
    if any(map(_has_anchor, nodes)):
        raise UnsupportedPattern("^ or $ within it")
    return Concatenation(tuple(nodes))


def _parts(node: Node) -> list[Node]:
    return [*node.nodes] if isinstance(node, Concatenation) else [node]


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Repetition(inner):
            return _has_anchor(inner)
        case Concatenation(nodes) | Alternation(nodes):
            return any(map(_has_anchor, nodes))
        case CharacterSet():
            return False


def _limited(node: Node, least: int, most: int | None) -> Node:
    """Return a node for texts of a certain length.

    Raises UnsupportedPattern if the lengths of the texts vary, and not in one place.
    """
    shortest, longest = _lengths(node)
    if shortest >= least and (
        most is None or (longest is not None and longest <= most)
    ):
        return node
    nodes = _parts(node)
    varying = [index for index, each in enumerate(nodes) if len({*_lengths(each)}) > 1]
    repeated = nodes[varying[0]] if len(varying) == 1 else None
    if not isinstance(repeated, Repetition) or _lengths(repeated.node) != (1, 1):
        raise UnsupportedPattern("with minLength or maxLength")
    others = shortest - repeated.least
    low, high = max(repeated.least, least - others), repeated.most
    if most is not None:
        high = most - others if high is None else min(high, most - others)
    if high is not None and high < low:
        raise UnsupportedPattern("no text matches, with minLength and maxLength")
    if max(low, high or 0) > REPEAT_MAX:
        raise UnsupportedPattern(f"more than {REPEAT_MAX} repetitions")
    nodes[varying[0]] = Repetition(repeated.node, low, high)
    return Concatenation(tuple(nodes))


def _lengths(node: Node) -> tuple[int, int | None]:
    """Return the lengths of the shortest and the longest text; None: any length."""
    match node:
        case CharacterSet():
            return 1, 1
        case Anchor():
            return 0, 0
        case Repetition(inner, least, most):
            shortest, longest = _lengths(inner)
            if longest == 0:
                return 0, 0
            if longest is None or most is None:
                return shortest * least, None
            return shortest * least, longest * most
        case Concatenation(nodes):
            lengths = [_lengths(each) for each in nodes]
            ends = [end for _, end in lengths if end is not None]
            total = sum(ends) if len(ends) == len(lengths) else None
            return sum(begin for begin, _ in lengths), total
        case Alternation(nodes):
            lengths = [_lengths(each) for each in nodes]
            ends = [end for _, end in lengths if end is not None]
            largest = max(ends) if len(ends) == len(lengths) else None
            return min(begin for begin, _ in lengths), largest


# Writing what llama.cpp reads.

JSON_ESCAPES: Final = {
    **{'"': '"', "\\": "\\", "\b": "b", "\f": "f"},
    **{"\n": "n", "\r": "r", "\t": "t"},
}
"""What follows the backslash in JSON's short escapes, by what they stand for."""

ESCAPED: Final = sorted_ranges([(0, 0x1F), *ranges_of('"\\')])
"""The characters that JSON text has only escaped."""

BACKSLASH: Final = r"[\u005C]"


def _written(node: Node) -> str:
    match node:
        case CharacterSet(ranges):
            return _written_set(ranges)
        case Concatenation(nodes):
            return "".join(map(_written, nodes))
        case Alternation(nodes):
            texts = dict.fromkeys(map(_written, nodes))
            options = "|".join(text for text in texts if text)
            return f"({options}){'?' if '' in texts else ''}" if options else ""
        case Repetition(inner, least, most):
            text = _written(inner)
            if not text or most == 0:
                return ""
            atom = text if isinstance(inner, CharacterSet) else f"({text})"
            return atom + _written_bounds(least, most)
        case Anchor():
            raise AssertionError("anchors are around the whole")


def _written_bounds(least: int, most: int | None) -> str:
    match least, most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case 1, 1:
            return ""
        case _:
            return f"{{{least},{'' if most is None else most}}}"


def _written_set(ranges: Ranges) -> str:
    """Write the JSON text of a character: one class, or one after a backslash."""
    plain = complement(sorted_ranges((*complement(ranges), *ESCAPED)))
    letters = [
        letter
        for character, letter in JSON_ESCAPES.items()
        if any(low <= ord(character) <= high for low, high in ranges)
    ]
    options = []
    if plain:
        options.append(_written_class(plain))
    if letters:
        escapes = sorted_ranges((ord(each), ord(each)) for each in letters)
        options.append(BACKSLASH + _written_class(escapes))
    if not options:  # rare control characters alone
        options = [
            f"{BACKSLASH}u{code:04x}"
            for low, high in ranges
            for code in range(low, high + 1)
        ]
    if not options:
        raise UnsupportedPattern("a class without characters")
    return options[0] if plain and len(options) == 1 else f"({'|'.join(options)})"


def _written_class(ranges: Ranges) -> str:
    written = (
        _written_code(low) + (f"-{_written_code(high)}" if high > low else "")
        for low, high in ranges
    )
    return f"[{''.join(written)}]"


def _written_code(code: int) -> str:
    """Write a character of a class by its number, unless it is a letter or a digit."""
    if code < 0x80 and chr(code).isalnum():
        return chr(code)
    return f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
