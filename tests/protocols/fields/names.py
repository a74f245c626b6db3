"""The names in the modules of a wire, by what the code does with them; no types."""

import ast
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import shoal

SOURCE = Path(shoal.__file__).parent
_TELLING = (ast.Attribute, ast.keyword, ast.Call, ast.MatchClass)
_OWNED = re.compile(r"^    (?:def )?(\w+)[:(]|\bself\.(\w+)(?:: .*)? = ", re.MULTILINE)


class Names:
    """The names in a wire.

    A class with positional arguments, in a pattern or a call, stands for its fields.
    """

    def __init__(self, wire: str) -> None:
        self.read: set[str] = set()  # attributes, and classes in patterns
        self.written: set[str] = set()  # keywords, and classes that are called
        self.code = defaultdict[str, list[ast.stmt]](list)
        """Modules, and their functions and classes: ``jobs:encode_job``."""
        folder = SOURCE / "protocols" / wire
        for path in sorted(folder.rglob("*.py")):
            module = path.relative_to(folder).with_suffix("").as_posix()
            for top in ast.parse(path.read_bytes()).body:
                self.code[module].append(top)
                self.code[f"{module}:{_name(top)}"].append(top)
                for node in ast.walk(top):
                    if isinstance(node, _TELLING):  # few are
                        self._add(node)

    def _add(self, node: ast.AST) -> None:
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                self.read.add(name)
            case ast.MatchClass(cls, patterns, names):
                self.read.update([*names, _name(cls)] if patterns else names)
            case ast.keyword(arg=str(name)):
                self.written.add(name)
            case ast.Call(func=func, args=[_, *_]):
                self.written.add(_name(func))
            case _:
                pass

    def words(self, place: str) -> set[str]:
        """Return what some code names, also in texts that are no prose."""
        nodes = [node for top in self.code.get(place, ()) for node in ast.walk(top)]
        values = (each.value for each in nodes if isinstance(each, ast.Constant))
        texts = (
            v.decode("latin-1") if isinstance(v, bytes) else str(v) for v in values
        )
        found = (re.findall(r"\w+", text) for text in texts if " " not in text)
        return {*map(_name, nodes), *(word for words in found for word in words)}


@cache
def owned(room: str) -> Counter[str]:
    """Return how many classes of a room have an attribute of a name, or more."""
    texts = [path.read_text() for path in (SOURCE / room).rglob("*.py")]
    return Counter(a or b for text in texts for a, b in _OWNED.findall(text))


def _name(node: ast.AST) -> str:
    found = (getattr(node, each, "") for each in ("attr", "id", "arg", "name"))
    return next((each for each in found if each and isinstance(each, str)), "")
