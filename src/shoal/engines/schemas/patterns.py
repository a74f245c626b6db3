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

from shoal.engines.schemas import pattern_syntax as syntax

PATTERN_MAX = 10_000  # characters


def translate_pattern(pattern: str, least: int = 0, most: int | None = None) -> str:
    """Return the pattern of the JSON text of strings that match another pattern.

    They have from ``least`` to ``most`` characters.

    Raises UnsupportedPattern.
    """
    if len(pattern) > PATTERN_MAX:
        raise syntax.UnsupportedPattern(f"more than {PATTERN_MAX} characters")
    node = _limited(_anchored(syntax.parse_pattern(pattern)), least, most)
    return f"^{_written(node)}$"


# What the pattern means.


def _anchored(node: syntax.Node) -> syntax.Node:
    """Return a node for the whole text: anything may be where no anchor is.

    Raises UnsupportedPattern for anchors elsewhere than around a whole alternative.
    """
    if isinstance(node, syntax.Alternation):
        return syntax.Alternation(tuple(map(_anchored, node.nodes)))
    nodes = _parts(node)
    anything = syntax.Repetition(syntax.ANY, 0, None)
    if nodes and nodes[0] == syntax.Anchor(at_end=False):
        nodes[0] = syntax.Concatenation(())
    else:
        nodes.insert(0, anything)
    if nodes[-1] == syntax.Anchor(at_end=True):
        nodes.pop()
    else:
        nodes.append(anything)
    if any(map(_has_anchor, nodes)):
        raise syntax.UnsupportedPattern("^ or $ within it")
    return syntax.Concatenation(tuple(nodes))


def _parts(node: syntax.Node) -> list[syntax.Node]:
    return [*node.nodes] if isinstance(node, syntax.Concatenation) else [node]


def _has_anchor(node: syntax.Node) -> bool:
    match node:
        case syntax.Anchor():
            return True
        case syntax.Repetition(inner):
            return _has_anchor(inner)
        case syntax.Concatenation(nodes) | syntax.Alternation(nodes):
            return any(map(_has_anchor, nodes))
        case syntax.CharacterSet():
            return False


def _limited(node: syntax.Node, least: int, most: int | None) -> syntax.Node:
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
    if not isinstance(repeated, syntax.Repetition) or _lengths(repeated.node) != (1, 1):
        raise syntax.UnsupportedPattern("with minLength or maxLength")
    rest_length = shortest - repeated.least
    low, high = max(repeated.least, least - rest_length), repeated.most
    if most is not None:
        high = most - rest_length if high is None else min(high, most - rest_length)
    if high is not None and high < low:
        raise syntax.UnsupportedPattern("no text matches, with minLength and maxLength")
    if max(low, high or 0) > syntax.REPEAT_MAX:
        raise syntax.UnsupportedPattern(f"more than {syntax.REPEAT_MAX} repetitions")
    nodes[varying[0]] = syntax.Repetition(repeated.node, low, high)
    return syntax.Concatenation(tuple(nodes))


def _lengths(node: syntax.Node) -> tuple[int, int | None]:
    """Return the lengths of the shortest and the longest text; None: any length."""
    match node:
        case syntax.CharacterSet():
            return 1, 1
        case syntax.Anchor():
            return 0, 0
        case syntax.Repetition(inner, least, most):
            shortest, longest = _lengths(inner)
            if longest == 0:
                return 0, 0
            if longest is None or most is None:
                return shortest * least, None
            return shortest * least, longest * most
        case syntax.Concatenation(nodes):
            lengths = [_lengths(each) for each in nodes]
            ends = [end for _, end in lengths if end is not None]
            total = sum(ends) if len(ends) == len(lengths) else None
            return sum(begin for begin, _ in lengths), total
        case syntax.Alternation(nodes):
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

ESCAPED: Final = syntax.sorted_ranges([(0, 0x1F), *syntax.ranges_of('"\\')])
"""The characters that JSON text has only escaped."""

BACKSLASH: Final = r"[\u005C]"


def _written(node: syntax.Node) -> str:
    match node:
        case syntax.CharacterSet(ranges):
            return _written_set(ranges)
        case syntax.Concatenation(nodes):
            return "".join(map(_written, nodes))
        case syntax.Alternation(nodes):
            texts = dict.fromkeys(map(_written, nodes))
            options = "|".join(text for text in texts if text)
            return f"({options}){'?' if '' in texts else ''}" if options else ""
        case syntax.Repetition(inner, least, most):
            text = _written(inner)
            if not text or most == 0:
                return ""
            atom = text if isinstance(inner, syntax.CharacterSet) else f"({text})"
            return atom + _written_bounds(least, most)
        case syntax.Anchor():
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


def _written_set(ranges: syntax.Ranges) -> str:
    """Write the JSON text of a character: one class, or one after a backslash."""
    plain = syntax.complement(
        syntax.sorted_ranges((*syntax.complement(ranges), *ESCAPED))
    )
    letters = [
        letter
        for character, letter in JSON_ESCAPES.items()
        if any(low <= ord(character) <= high for low, high in ranges)
    ]
    options = []
    if plain:
        options.append(_written_class(plain))
    if letters:
        escapes = syntax.sorted_ranges((ord(each), ord(each)) for each in letters)
        options.append(BACKSLASH + _written_class(escapes))
    if not options:  # rare control characters alone
        options = [
            f"{BACKSLASH}u{code:04x}"
            for low, high in ranges
            for code in range(low, high + 1)
        ]
    if not options:
        raise syntax.UnsupportedPattern("a class without characters")
    return options[0] if plain and len(options) == 1 else f"({'|'.join(options)})"


def _written_class(ranges: syntax.Ranges) -> str:
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
