"""What holds of the source as a whole, beyond who may import whom.

Who reads the clock and draws random numbers is a rule of the linter, in
``pyproject.toml``.  What is exempt from a rule says so, and why, where it stands.
"""

import ast
import gc
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from shoal.protocols import discover

SOURCE = Path(__file__).parents[1] / "src" / "shoal"
MODULES = {
    path.relative_to(SOURCE).as_posix(): path.read_text()
    for path in sorted(SOURCE.rglob("*.py"))
}


def nodes_of(text: str) -> Sequence[ast.AST]:
    """Return the nodes of a module.  The caller keeps none, or they cost more."""
    # Nothing of a tree is garbage, and looking for it takes longer than parsing.
    collects = gc.isenabled()
    gc.disable()
    try:
        nodes: list[ast.AST] = [ast.parse(text)]
        for node in nodes:  # which grows
            nodes += _children(node)
    finally:
        if collects:
            gc.enable()
    return nodes


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node; ``ast.iter_child_nodes`` takes twice as long."""
    for name in node._fields:
        child = getattr(node, name, None)
        if isinstance(child, list):
            yield from (each for each in child if isinstance(each, ast.AST))
        elif isinstance(child, ast.AST):
            yield child


def listed(faults: Sequence[str], remedy: str) -> str:
    """Return the message of a failure: each fault, and what to do."""
    return "\n".join([f"{remedy}:", *(f"  {each}" for each in faults)])


# Our own wire has the name of everything here.
@pytest.mark.parametrize("name", sorted(discover().keys() - {"shoal"}))
def test_name_of_a_protocol_stays_in_its_folder_and_its_face(name: str) -> None:
    mounts = {f"gateway/faces/{name}.py", "gateway/all_operations.py"}
    strays = [
        path
        for path, text in MODULES.items()
        if re.search(name, text, re.IGNORECASE)
        and not path.startswith(f"protocols/{name}/")
        and path not in mounts
    ]

    assert not strays, listed(
        strays,
        f"move what knows {name} into protocols/{name}/, behind protocols/seam/, or "
        "use a word of the domain",
    )


def test_every_protocol_folder_is_discovered() -> None:
    folders = {
        path.split("/")[1]
        for path in MODULES
        if path.startswith("protocols/") and path.count("/") == 2
    }

    assert {*discover(), "seam"} == folders, (
        "give each folder of protocols/ a PROTOCOL in its __init__.py"
    )


def test_a_class_name_is_one_thing() -> None:
    # Every wire has its configuration and its session.
    several = {"Config", "Session"}
    places: dict[str, list[str]] = {}
    for path, text in MODULES.items():
        for name in re.findall(r"^class ([A-Za-z]\w*)", text, re.MULTILINE):
            places.setdefault(name, []).append(path)

    twice = [
        f"{name}: {', '.join(paths)}"
        for name, paths in places.items()
        if len(paths) > 1 and name not in several
    ]
    assert not twice, listed(twice, "give all but one another name, by what each is")


def test_a_folder_holds_what_a_reader_can_keep_in_mind() -> None:
    modules = Counter(
        path.rpartition("/")[0] for path in MODULES if not path.endswith("__init__.py")
    )

    full = [f"{folder}: {n} modules" for folder, n in modules.items() if n > 25]
    assert not full, listed(full, "move modules that belong together into a folder")


def test_loggers_are_named_by_room() -> None:
    # The client logs as the library it is: one logger, `shoal` (docs/tasks.md).
    wrong = [
        f"{path}: getLogger({name}), expected {expected}"
        for path, text in MODULES.items()
        for name in re.findall(r"^log = logging\.getLogger\(([^)]+)\)", text, re.M)
        for room in [path.partition("/")[0]]
        for expected in ['"shoal"' if room == "client" else f'"shoal.{room}"']
        if name != expected
    ]

    assert not wrong, listed(wrong, "name each logger by its room")


def test_messages_name_no_package_that_an_index_may_not_have() -> None:
    named = re.compile(r"pip install [^`\n]*\bshoal(==|\[| @)")

    naming = [path for path, text in MODULES.items() if named.search(text)]
    assert not naming, listed(
        naming,
        "let the message name what this copy was installed from: "
        "shoal.config.installation",
    )


def test_bugs_are_caught_only_where_they_are_supervised() -> None:
    silent = [
        f"{path}:{node.lineno}"
        for path, text in MODULES.items()
        if re.search(r"\bexcept(:|.*\b(Base)?Exception\b)", text)
        for node in nodes_of(text)
        if isinstance(node, ast.ExceptHandler)
        and _catches_all(node)
        and not _says_why(node, text)
    ]

    assert not silent, listed(
        silent,
        "catch the errors that are expected.  Where all must end (a connection or a "
        "line of a batch is supervised, foreign code is run), say so in a comment at "
        "the beginning of the handler",
    )


def _catches_all(handler: ast.ExceptHandler) -> bool:
    """Say whether a handler takes every error, and does not pass it on."""
    if any(isinstance(node, ast.Raise) for node in ast.walk(handler)):
        return False
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return not names.isdisjoint({"Exception", "BaseException"})


def _says_why(handler: ast.ExceptHandler, text: str) -> bool:
    """Say whether a handler begins with a comment."""
    lines = text.splitlines()[handler.lineno - 1 : handler.body[0].lineno]
    return any("# " in line for line in lines)


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        ("except Exception:\n    log()", True),
        ("except (ValueError, Exception) as error:\n    log(error)", True),
        ("except:\n    log()", True),
        ("except Exception:\n    # It is supervised here.\n    log()", False),
        ("except BaseException:\n    close()\n    raise", False),
        ("except ValueError:\n    log()", False),
    ],
)
def test_handler_of_all_errors_without_a_reason_is_found(
    handler: str, found: bool
) -> None:
    text = f"try:\n    run()\n{handler}"
    (node,) = (n for n in nodes_of(text) if isinstance(n, ast.ExceptHandler))

    assert (_catches_all(node) and not _says_why(node, text)) is found


def test_only_the_hub_changes_the_pool() -> None:
    changing = {
        path
        for path, text in MODULES.items()
        if "pool." in text and re.search(r"\bpool\.(apply|reopen)\(", text)
    }

    # What was left in the store is put in before the hub runs.
    strays = sorted(changing - {"coordinator/hub.py", "coordinator/recovery.py"})
    assert not strays, listed(strays, "give the hub a fact, which changes the pool")


# Pickles run code when they are read.
_RUNS_DATA = re.compile(
    r"[ ]*(?:import|from) (?:pickle|marshal|shelve)\b"
    r"|[^#\"]*(?<![\w.])(?:eval|exec|compile)\("
)
_RISKY_WORDS = ("pickle", "marshal", "shelve", "eval(", "exec(", "compile(")


def test_nothing_is_unpickled_or_evaluated() -> None:
    risky = [
        f"{path}: {line.strip()}"
        for path, text in MODULES.items()
        if any(word in text for word in _RISKY_WORDS)
        for line in text.splitlines()
        if _RUNS_DATA.match(line) and "# Trusted: " not in line
    ]

    assert not risky, listed(
        risky,
        "read data as data: msgspec, tasks/values.py.  Where somebody chose to trust "
        "those who wrote it (docs/tasks.md), say so at the end of the line: "
        "`# Trusted: ...`",
    )


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("import pickle", True),
        ("    from marshal import loads", True),
        ("value = eval(text)", True),
        ("# It outlives exec(2).", False),
        ("PATTERN = re.compile(text)", False),
        ("import cloudpickle", False),
    ],
)
def test_code_that_runs_data_is_found(line: str, found: bool) -> None:
    assert bool(_RUNS_DATA.match(line)) is found


def test_http_statuses_are_chosen_in_the_gateway_alone() -> None:
    choosing = [
        f"{path}:{node.value.lineno}"
        for path, text in MODULES.items()
        if not path.startswith("gateway/") and re.search(r"\bstatus ?=", text)
        for node in nodes_of(text)
        if isinstance(node, ast.keyword)
        and node.arg == "status"
        and isinstance(node.value, ast.Constant)
    ]

    assert not choosing, listed(
        choosing, "raise an error that says whose fault it is; gateway/ has its status"
    )


# What admits its holder (docs/keys.md) is compared by `compare_digest`, which takes as
# long for any guess.  Keys and join tokens are looked up by their digests, which reveal
# nothing.
_WORDS = (
    "authorization|hint|hmac|mac|passcode|password|presented|proof|secret|signature"
    "|token|pairing_code"
)
_SECRET = re.compile(rf"(?:^|_)(?:{_WORDS})(?:_|$)")
_SECRET_OR_DIGEST = re.compile(rf"(?:^|_)(?:{_WORDS}|digest)(?:_|$)")
_MENTION = re.compile(rf"(?<![a-z])(?:{_WORDS}|digest)(?![a-rt-z])")


def test_secrets_are_compared_in_constant_time() -> None:
    found = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, text in MODULES.items()
        if _MENTION.search(text)
        for node in _comparisons(nodes_of(text), _names_of_secrets(path))
        if not _is_declared(node, text)
    ]

    assert not found, listed(
        found,
        "compare secrets by hmac.compare_digest: `==`, `in` and the like take longer "
        "for a better guess.  If a value is none, say why in a comment at the end of "
        "the line, or above it: `# No secret: ...`",
    )


def _names_of_secrets(path: str) -> re.Pattern[str]:
    """Return what matches the names of secrets in a module.

    In codecs, and in rooms that admit nobody, digests are those of content.
    """
    admits = path.startswith(("coordinator/", "gateway/", "protocols/"))
    return _SECRET_OR_DIGEST if admits and "/codec/" not in path else _SECRET


def _comparisons(
    nodes: Sequence[ast.AST], names: re.Pattern[str]
) -> Iterator[ast.expr]:
    """Yield what compares secrets: by their names, or by what their function is for."""
    within: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and _judges_a_secret(node, names):
            within.update(ast.walk(node))
        if isinstance(node, ast.expr):
            sides = _compared_values(node)
            if sides and (
                node in within or any(_is_named(each, names) for each in sides)
            ):
                yield node


def _judges_a_secret(function: ast.FunctionDef, names: re.Pattern[str]) -> bool:
    """Say whether a function takes a secret, and answers yes or no."""
    given = (function.name, *(each.arg for each in function.args.args))
    match function.returns:
        case ast.Name("bool"):
            # It may be about several: `passcodes_match`.
            return any(names.search(each.replace("s_", "_")) for each in given)
        case _:
            return False


# They stop at the first difference.
_COMPARING_CALLS = frozenset(
    {"startswith", "endswith", "removeprefix", "removesuffix", "eq", "ne", "__eq__"}
    | {"find", "index", "count", "match", "fullmatch", "search"}
)


def _compared_values(node: ast.expr) -> Sequence[ast.expr]:
    """Return what an expression compares; nothing if that takes no longer for a guess.

    With a constant, there is nothing to guess about.
    """
    match node:
        case ast.Compare(left, ops, comparators):
            by_value = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
            sides = [left, *comparators]
            compares = all(isinstance(each, by_value) for each in ops)
        case ast.Call(ast.Attribute(owner, name), arguments):
            sides = [owner, *arguments]
            compares = name in _COMPARING_CALLS and bool(arguments)
        case _:
            return ()
    return sides if compares and not any(map(_is_constant, sides)) else ()


def _is_constant(value: ast.expr) -> bool:
    match value:
        case ast.Constant():
            return True
        case ast.Name(name) | ast.Attribute(attr=name):
            return name.isupper()
        case _:
            return False


def _is_named(value: ast.expr, names: re.Pattern[str]) -> bool:
    match value:
        case ast.Name(name) | ast.Attribute(attr=name):
            return bool(names.search(name))
        case ast.Subscript(inner) | ast.Call(inner):
            return _is_named(inner, names)
        case ast.Tuple(elements):
            return any(_is_named(each, names) for each in elements)
        case _:
            return False


def _is_declared(node: ast.expr, text: str) -> bool:
    """Say whether a comment at the lines of a node, or above them, says "No secret"."""
    lines = text.splitlines()
    first = node.lineno - 1
    while lines[first - 1].lstrip().startswith("# "):
        first -= 1
    return any("# No secret: " in line for line in lines[first : node.end_lineno])


@pytest.mark.parametrize(
    "code",
    [
        "token == self._token",
        "wanted != presented.token",
        "proof in self._proofs",
        "self._token.startswith(token)",
        "token.startswith(self._token)",
        "operator.eq(self._token, token)",
        "token.__eq__(self._token)",
        "re.fullmatch(self._token, line)",
        "body.pairing_code == code.code",
        "session.digest in self._sessions",
        "def passcodes_match(own: str, theirs: str) -> bool:\n    return own == theirs",
        "def matches(token: str) -> bool:\n    pair = both(token)\n"
        "    return pair[0] == pair[1]",
    ],
)
def test_comparison_that_takes_longer_for_a_better_guess_is_found(code: str) -> None:
    assert [*_comparisons(nodes_of(code), _SECRET_OR_DIGEST)]


@pytest.mark.parametrize(
    "code",
    [
        'token == ""',
        "token == ANY_TOKEN",
        "token is None",
        "hint.kind < 5",
        "hmac.compare_digest(token, self._token)",
        "PATTERN.fullmatch(token)",
        "def is_named(name: str) -> bool:\n    return name == 'x' or name in names()",
    ],
)
def test_what_reveals_nothing_is_no_comparison_of_secrets(code: str) -> None:
    assert not [*_comparisons(nodes_of(code), _SECRET_OR_DIGEST)]


@pytest.mark.parametrize(
    ("lines", "declared"),
    [
        ("proof in seen  # No secret: it was valid", True),
        ("# No secret: it was\n# valid.\nproof in seen", True),
        ("# It was valid.\nproof in seen", False),
        ("# No secret: this one.\nother = 1\nproof in seen", False),
    ],
)
def test_a_value_is_no_secret_if_a_comment_says_so(lines: str, declared: bool) -> None:
    (node,) = (each for each in nodes_of(lines) if isinstance(each, ast.Compare))

    assert _is_declared(node, lines) is declared
