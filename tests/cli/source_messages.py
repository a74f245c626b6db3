"""The texts in the source, to compare what a page quotes with what programs print."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "shoal"
GAP = "…"  # a value that is put in


def occurs(message: str) -> bool:
    """Say whether the source has each part of a message between its values."""
    parts = (each.strip() for each in message.split(GAP))
    return all(part in _texts() for part in parts)


@cache
def _texts() -> str:
    """Return the texts of the source, a line each, with ``…`` for values."""
    return "\n".join(
        text
        for file in sorted(SOURCE.rglob("*.py"))
        for text in _texts_of(ast.parse(file.read_text("utf-8")))
    )


def _texts_of(tree: ast.AST) -> Iterator[str]:
    """Yield the texts in a tree; those that document something are not printed."""
    match tree:
        case ast.Constant(value=str() as text):
            yield text.replace("%s", GAP)
        case ast.JoinedStr(values=parts):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else GAP
                for part in parts
            )
        case ast.Expr(value=ast.Constant()):
            pass
        case _:
            for child in ast.iter_child_nodes(tree):
                yield from _texts_of(child)
