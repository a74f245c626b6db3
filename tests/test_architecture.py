"""What holds of the source as a whole, beyond who may import whom."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from shoal.protocols import discover

SOURCE = Path(__file__).parents[1] / "src" / "shoal"
MODULES = {
    path.relative_to(SOURCE).as_posix(): path.read_text()
    for path in sorted(SOURCE.rglob("*.py"))
}

# Where a connection or a line of a batch is supervised, and where somebody else's code
# is run or gets the error.
CATCHES_ALL = {
    "client/options.py",
    "gateway/batches/line_runner.py",
    "peers/connections.py",
    "worker/listening_worker.py",
    "transports/driver.py",
    "peers/membership.py",
    "peers/relay.py",
    "tasks/child.py",
    "tasks/exception_record.py",
    "tasks/invocation.py",
    "training/pytorch/process_group.py",
    "transports/websocket_messages.py",
    "worker/jobs.py",
}


# Where somebody chose to trust those who wrote it (docs/tasks.md).
UNPICKLES = {"client/joblib_backend.py"}


parse = cache(ast.parse)


@cache
def code_of(text: str) -> Sequence[ast.AST]:
    """Return all nodes of a module."""
    return [*ast.walk(parse(text))]


@pytest.mark.parametrize("name", discover())
def test_name_of_a_protocol_stays_in_its_folder_and_its_face(name: str) -> None:
    mounts = {f"gateway/{name}.py", "gateway/operations.py"}
    strays = [
        path
        for path, text in MODULES.items()
        if re.search(name, text, re.IGNORECASE)
        and not path.startswith(f"protocols/{name}/")
        and path not in mounts
    ]

    assert strays == []


def test_every_protocol_folder_is_discovered() -> None:
    folders = {
        path.split("/")[1]
        for path in MODULES
        if path.startswith("protocols/") and path.count("/") == 2
    }

    assert {*discover(), "seam"} == folders


def test_a_class_name_is_one_thing() -> None:
    # Every wire has its configuration and its session.
    several = {"Config", "Session"}
    places: dict[str, list[str]] = {}
    for path, text in MODULES.items():
        for node in parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)

    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert {name: twice[name] for name in twice.keys() - several} == {}


def test_a_folder_holds_what_a_reader_can_keep_in_mind() -> None:
    modules = Counter(
        path.rpartition("/")[0] for path in MODULES if not path.endswith("__init__.py")
    )

    assert {folder: n for folder, n in modules.items() if n > 25} == {}


def test_loggers_are_named_by_room() -> None:
    # The client logs as the library it is: one logger, `shoal` (docs/tasks.md).
    wrong = {
        path: name
        for path, text in MODULES.items()
        for name in re.findall(r"getLogger\(([^)]+)\)", text)
        for room in [path.partition("/")[0]]
        if name != ('"shoal"' if room == "client" else f'"shoal.{room}"')
    }

    assert wrong == {}


def test_messages_name_no_package_that_an_index_may_not_have() -> None:
    # `shoal.config.installation` knows what this copy was installed from.
    named = re.compile(r"pip install [^`\n]*\bshoal(==|\[| @)")

    assert [path for path, text in MODULES.items() if named.search(text)] == []


def test_bugs_are_caught_only_where_they_are_supervised() -> None:
    catching = {
        path
        for path, text in MODULES.items()
        for node in code_of(text)
        if isinstance(node, ast.ExceptHandler) and _catches_all(node)
    }

    assert catching <= CATCHES_ALL


def _catches_all(handler: ast.ExceptHandler) -> bool:
    """Say whether a handler takes every error, and does not pass it on."""
    if any(isinstance(node, ast.Raise) for node in ast.walk(handler)):
        return False
    if handler.type is None:
        return True
    names = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}
    return not names.isdisjoint({"Exception", "BaseException"})


def test_only_the_hub_changes_the_pool() -> None:
    changing = {
        path
        for path, text in MODULES.items()
        if re.search(r"\bpool\.(apply|reopen)\(", text)
    }

    # What was left in the store is put in before the hub runs.
    assert changing == {"coordinator/hub.py", "coordinator/recovery.py"}


def test_nothing_is_unpickled_or_evaluated() -> None:
    risky = {
        path
        for path, text in MODULES.items()
        for node in code_of(text)
        if _runs_data(node)
    }

    assert risky == UNPICKLES


def _runs_data(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(each.name in {"pickle", "marshal", "shelve"} for each in names)
        case ast.ImportFrom(module=module):
            return module in {"pickle", "marshal", "shelve"}
        case ast.Call(func=ast.Name(id=name)):
            return name in {"eval", "exec", "compile"}
        case _:
            return False


def test_http_statuses_are_chosen_in_the_gateway_alone() -> None:
    choosing = {
        path
        for path, text in MODULES.items()
        for node in code_of(text)
        if isinstance(node, ast.keyword)
        and node.arg == "status"
        and isinstance(node.value, ast.Constant)
    }

    assert {path for path in choosing if not path.startswith("gateway/")} == set()


def test_time_and_chance_are_read_at_the_rim() -> None:
    reading = {
        path
        for path, text in MODULES.items()
        if re.search(r"\b(time\.(time|monotonic)|datetime\.now|secrets\.\w+)\(", text)
    }

    assert reading <= {
        "cli/local/doctor/coordinator_checks.py",
        "cli/pool/status.py",
        "cli/use/chat/__init__.py",
        "cli/use/run.py",
        "cli/use/models/source.py",
        "engines/llama_child.py",  # a process of its own
        "gateway/http/request_record.py",
        "gateway/http/ids.py",
        "config/secret_files.py",
        "client/training_run.py",  # in the program that waits, which draws the token
        # Blocking sockets, in the process that trains.
        "training/generations/sequence.py",
        "training/group.py",
        "training/launch/member_reports.py",
        "training/run_link.py",
        "training/mixed_group.py",
        "training/rank_connections.py",
        "training/rank_port.py",
        "training/pytorch/meeting_store.py",
        "transports/rank_socket.py",
        "transports/tls.py",  # a certificate begins and ends at some time
    }


# The paths of what admits its holder, to where it is compared in constant time
# (docs/keys.md): who calls what.  Keys and join tokens are looked up by
# their digests, which reveal nothing.
SECRETS_LEAD_TO = {
    "compare_digest": {
        "protocols/macfleet/codec/keys.py is_signed",
        "protocols/macfleet/strong_handshake.py is_token_proof",
        "protocols/seam/admission.py token_matches",
        "protocols/seam/token_proof.py matches",
        "protocols/tealenet/admission.py passcodes_match",
    },
    "is_signed": {
        "protocols/macfleet/codec/heartbeat_lines.py _decode",
        "protocols/macfleet/handshake_messages.py decode_suffix",
        "protocols/macfleet/handshake_messages.py decode_second",
        "protocols/macfleet/handshake_messages.py decode_third",
    },
    "is_token_proof": {"protocols/macfleet/strong_handshake.py proves_token"},
    "token_matches": {
        "gateway/jobs/pairing.py claim_pairing_code",
        "protocols/seam/admission.py proves_token",
    },
    "passcodes_match": {
        "protocols/tealenet/admission.py admit",
        "protocols/tealenet/greeting.py hello_ack",
        "protocols/tealenet/session_setup.py introduced_peer",
    },
    "proves_token": {
        "app/worker_ports.py admit",
        "coordinator/admission.py admit",
        "protocols/macfleet/handshake_client.py conclude",
        "protocols/macfleet/handshake_server.py matches",
        "protocols/macfleet/ranks/messages.py admission",
    },
    "by_digest": {
        "coordinator/credential_cache.py by_secret",
        "gateway/http/access.py _redeem",
        "gateway/http/access.py _signed_in",
        "gateway/http/access.py recognizes",
        "gateway/http/authentication.py by_digest",
    },
    "by_secret": {
        "coordinator/admission.py _meant",
        "gateway/http/authentication.py authenticate",
    },
}

# Comparisons of what is named like a secret and is none, and why.
COMPARES_NAMES = {
    # The user's own.
    "cli/worker/join_target.py": "token == ANY_TOKEN, token not in ('', stored_token)",
    # A hint is sent in the clear, and stands for a digest that it does not reveal.
    "coordinator/admission.py": "token_hint(each.digest) == presented.hint",
    "coordinator/receipt_verifier.py": "each.job_id in presented",  # jobs
    # Digests of random cookies, which reveal nothing, and of keys that are presented no
    # more.
    "gateway/http/browser_sessions.py": (
        "each.key_digest == key.digest, session.digest in self._sessions"
    ),
    # Two of our own, after the peer has proved one of them.
    "protocols/macfleet/handshake_server.py": (
        "presented.digest == self._settings.digest"
    ),
    # Valid proofs only, for replays are no guesses.
    "protocols/macfleet/heartbeat.py": "proof in self._proofs",
    # Content, not secrets.
    "protocols/macfleet/codec/reserved_frames.py": (
        "partial.hash.digest() != partial.digest, sha256(blob).digest() != digest"
    ),
    # What is public is checked again only if it has changed.
    "protocols/tealenet/relay/registry.py": (
        "before.profile.signature != message.signature"
    ),
    "tasks/schemas.py": "hint in _REBUILT",  # a type hint
}

SECRET_NAMES = frozenset(
    {"authorization", "hint", "hmac", "mac", "passcode", "password", "presented"}
    | {"proof", "secret", "signature", "token"}
)
# Elsewhere, digests are those of content.
DIGESTS_OF_SECRETS = (
    *("coordinator/admission", "coordinator/credential_cache"),
    *("gateway/http/", "gateway/jobs/pairing", "protocols/"),
)


def test_secrets_are_compared_in_constant_time() -> None:
    timed: dict[str, set[str]] = {}
    lead: dict[str, set[str]] = {name: set() for name in SECRETS_LEAD_TO}
    for path, text in MODULES.items():
        names = SECRET_NAMES
        if path.startswith(DIGESTS_OF_SECRETS):
            names |= {"digest"}
        if path == "gateway/jobs/pairing.py":
            names |= {"code"}
        for node in code_of(text):
            if _compares(node, names):
                timed.setdefault(path, set()).add(ast.unparse(node))
        if any(name in text for name in lead):
            for caller, called in _calls(parse(text)):
                if called in lead:
                    lead[called].add(f"{path} {caller}")

    shown = {path: ", ".join(sorted(each)) for path, each in timed.items()}
    assert shown == COMPARES_NAMES
    assert lead == SECRETS_LEAD_TO


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
    ],
)
def test_comparison_that_takes_longer_for_a_better_guess_is_found(code: str) -> None:
    (node,) = ast.parse(code).body

    assert any(_compares(each, SECRET_NAMES) for each in ast.walk(node))


# They stop at the first difference.
_COMPARING_CALLS = frozenset(
    {"startswith", "endswith", "removeprefix", "removesuffix", "eq", "ne", "__eq__"}
    | {"find", "index", "count", "match", "fullmatch", "search"}
)


def _compares(node: ast.AST, names: frozenset[str]) -> bool:
    """Say whether an expression compares a value with one of these names.

    Not with a constant: there is nothing to guess about "".
    """
    match node:
        case ast.Compare(left, ops, comparators):
            by_value = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
            sides = [left, *comparators]
            compares = all(isinstance(each, by_value) for each in ops)
        case ast.Call(ast.Attribute(owner, name), arguments):
            sides = [owner, *arguments]
            patterns = any(ast.unparse(each).isupper() for each in sides)
            compares = name in _COMPARING_CALLS and bool(arguments) and not patterns
        case _:
            return False
    return (
        compares
        and not any(isinstance(each, ast.Constant) for each in sides)
        and any(_is_named(each, names) for each in sides)
    )


def _calls(node: ast.AST, caller: str = "") -> Iterator[tuple[str, str]]:
    """Yield the calls in a module: in which function, and of what name."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        caller = node.name
    match node:
        case ast.Call(ast.Name(name)) | ast.Call(ast.Attribute(attr=name)):
            yield caller, name
        case _:
            pass
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, caller)


def _is_named(value: ast.expr, names: frozenset[str]) -> bool:
    match value:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return not (name.isupper() or names.isdisjoint(name.lower().split("_")))
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return _is_named(inner, names)
        case ast.Tuple(elts=elements):
            return any(_is_named(each, names) for each in elements)
        case _:
            return False
