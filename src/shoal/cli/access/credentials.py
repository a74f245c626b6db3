"""``shoal keys``, ``tokens`` and ``pair``: who may call, join, and do private jobs."""

import shlex
import sys
from typing import Any, TypeAlias

import click

from shoal.cli.options import DURATION, pass_api_with_json, yes_option
from shoal.cli.terminal import Columns, format_day, printable, show, show_table
from shoal.client.coordinator import CoordinatorApi, item_path
from shoal.domain.errors import ClientError, InvalidRequest

Credential: TypeAlias = dict[str, Any]
"""A key or a token, as the admin API describes it."""

KEYS_PATH = "/admin/keys"
LIMITS = {
    "requests_per_minute": "requests a minute",
    "tokens_per_minute": "tokens a minute",
    "tokens_per_day": "tokens a day",
    "budget": "total tokens",
}
KEY_COLUMNS: Columns = {
    "NAME": "name",
    "ID": "id",
    "KEY": lambda key: f"{key['start']}…" if key["start"] else "",
    "SCOPE": "scope",
    "EXPIRES": lambda key: _expiry(key),
    "REQUESTS": "requests",
    "TOKENS": lambda key: key["prompt_tokens"] + key["completion_tokens"],
    "LIMITS": lambda key: ", ".join(_limits(key)),
}
TOKENS_PATH = "/admin/tokens"
TOKEN_COLUMNS: Columns = {
    "NAME": "name",
    "ID": "id",
    "EXPIRES": lambda token: _expiry(token),
    "USES": lambda token: (
        "any"
        if token["uses"] is None
        else f"{len(token['workers'])} of {token['uses']}"
    ),
    "CONNECTED": "present",
    "MODELS": lambda token: ", ".join(token["models"]) or "any",
}


@click.group("keys")
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command("create")
@click.argument("name")
@click.option(
    "--scope",
    type=click.Choice(("read", "use", "monitor", "admin")),
    default="use",
    show_default=True,
    help="Rights of the key.  read: see its own jobs; use: also submit jobs; monitor: "
    "see what belongs to all keys, change nothing; admin: everything.",
)
@click.option(
    "--expires",
    type=DURATION,
    metavar="TIME",
    help="Lifetime, such as 12h or 30d.  Default: unlimited.",
)
@click.option(
    "--requests-per-minute", type=int, metavar="N", help="Limit of requests a minute."
)
@click.option(
    "--tokens-per-minute", type=int, metavar="N", help="Limit of tokens a minute."
)
@click.option("--tokens-per-day", type=int, metavar="N", help="Limit of tokens a day.")
@click.option("--budget", type=int, metavar="N", help="Limit of total tokens.")
@click.option(
    "--priority-max",
    type=click.Choice(("low", "normal", "high")),
    default="high",
    show_default=True,
    help="Highest priority of its jobs.",
)
@click.option(
    "--hosted",
    is_flag=True,
    help="Let hosted providers do its jobs that no machine of the pool takes in time; "
    "it pays for them.",
)
@click.option(
    "--hosted-after",
    type=DURATION,
    default="20s",
    show_default=True,
    metavar="TIME",
    help="How long these wait for a machine of the pool.",
)
@pass_api_with_json
def create_key(
    api: CoordinatorApi,
    name: str,
    scope: str,
    expires: int | None,
    priority_max: str,
    hosted: bool,
    hosted_after: int,
    as_json: bool,
    **limits: int | None,
) -> None:
    """Create a key and print it, once.

    NAME is the owner of the key; jobs and usage are recorded under it.
    """
    body = {"name": name, "scope": scope, "expires_in": expires, **limits}
    body |= {"priority_max": priority_max}
    body |= {"hosted_after": hosted_after} if hosted else {}
    key = api.request(KEYS_PATH, body)
    until = f", until {format_day(key['expires_at'])}" if key["expires_at"] else ""
    lines = [
        f"{key['key']}\n",
        f"This is the key of {key['name']} (scope {key['scope']}{until}).",
        "It is shown only once: the coordinator stores only its digest.",
    ]
    if "pinned_key" in key:
        lines += [
            "On other machines, Shoal's programs also accept it with the coordinator's "
            "fingerprint,",
            "and then trust this coordinator only:\n",
            key["pinned_key"],
        ]
    show(key, as_json, *lines)


@click.group("tokens")
def tokens() -> None:
    """Create, list and revoke join tokens of workers."""


@tokens.command("create")
@click.argument("name")
@click.option(
    "--uses",
    type=int,
    metavar="N",
    help="Number of workers that may join with it; they may reconnect, even after it "
    "has expired.  Default: unlimited.",
)
@click.option(
    "--expires",
    type=DURATION,
    metavar="TIME",
    help="Lifetime, such as 1h or 7d.  Default: unlimited.",
)
@click.option(
    "--models",
    default="",
    metavar="PATTERNS",
    help="Models that the workers may offer, such as 'llama*,qwen3-8b'.  Default: any.",
)
@pass_api_with_json
def create_token(
    api: CoordinatorApi,
    name: str,
    uses: int | None,
    expires: int | None,
    models: str,
    as_json: bool,
) -> None:
    """Create a token and print it, once."""
    patterns = [each.strip() for each in models.split(",") if each.strip()]
    body = {"name": name, "uses": uses, "expires_in": expires, "models": patterns}
    token = api.request(TOKENS_PATH, body)
    lines = [
        f"{token['join']}\n",
        f"This command joins with the token {token['name']}.  It is shown only once.",
    ]
    if token["uses"] is not None:
        advice = "Keep" if "--name" in token["join"] else "Add a"
        lines.append(
            f"{advice} --name: a worker that reconnects under another name counts as a "
            "new one."
        )
    show(token, as_json, *lines)


def _listing(noun: str, path: str, columns: Columns) -> click.Command:
    """Return the command ``ls``, for credentials at a ``path`` of the API."""

    @click.command("ls", help=f"List {noun}s.")
    @click.option("--all", "revoked", is_flag=True, help=f"Include revoked {noun}s.")
    @pass_api_with_json
    def command(api: CoordinatorApi, revoked: bool, as_json: bool) -> None:
        found = api.request_all(path)["data"]
        found = [each for each in found if revoked or each["revoked_at"] is None]
        nothing = f"no {noun}s; create one with: shoal {noun}s create NAME"
        show_table({"data": found}, as_json, columns, found, nothing)

    return command


def _revocation(path: str, help_: str, consequence: str) -> click.Command:
    """Return the command ``revoke``, which first asks, with the ``consequence``."""

    @click.command("revoke", help=f"{help_}\n\n`ls` lists names and ids.")
    @click.argument("name", metavar="NAME_OR_ID")
    @yes_option
    @pass_api_with_json
    def command(api: CoordinatorApi, name: str, yes: bool, as_json: bool) -> None:
        if not yes:
            _confirm(name, consequence)
        revoked = api.request(item_path(path, name), method="DELETE")
        show(revoked, as_json, f"revoked {revoked['name']} ({revoked['id']})")

    return command


def _expiry(credential: Credential) -> str:
    """Return when a credential expires, or when it was revoked."""
    if credential["revoked_at"] is not None:
        return f"revoked {format_day(credential['revoked_at'])}"
    return format_day(credential["expires_at"]) or "never"


def _confirm(name: str, consequence: str) -> None:
    """Ask at a terminal whether to revoke ``name``; without one, do not ask.

    Raises click.exceptions.Exit with status 1 unless the answer is yes.
    """
    if not sys.stdin.isatty():
        return
    try:
        agreed = click.confirm(f"Revoke {name}?  {consequence}", err=True)
    except click.Abort:
        agreed = False
    if not agreed:
        raise click.exceptions.Exit(1)


def _limits(key: Credential) -> list[str]:
    limits = [f"{key[name]} {what}" for name, what in LIMITS.items() if key[name]]
    if key["priority_max"] != "high":
        limits.append(f"priority up to {key['priority_max']}")
    if (after := key.get("hosted_after")) is not None:
        limits.append(f"hosted providers after {after:g} s")
    return limits


keys.add_command(_listing("key", KEYS_PATH, KEY_COLUMNS))
keys.add_command(
    _revocation(
        KEYS_PATH,
        "Revoke a key, and cancel the requests that use it.",
        "Requests that use it are cancelled.",
    )
)
tokens.add_command(_listing("token", TOKENS_PATH, TOKEN_COLUMNS))
tokens.add_command(
    _revocation(
        TOKENS_PATH,
        "Revoke a token, and disconnect the workers that joined with it.",
        "Workers that joined with it are disconnected.",
    )
)


PAIR_PATH = "/v1/trust"
PAIR_COLUMNS: Columns = {"WORKER": "provider_pubkey", "PAIRED": "paired_at"}
REFUSALS = {
    "invalid_code": "no such code; for a new one: shoal pair create USER",
    "already_claimed": "the code has been used; for a new one: shoal pair create USER",
    "expired": "the code has expired; for a new one: shoal pair create USER",
}
"""Explanations of the coordinator's refusals of a code."""


@click.group("pair")
def pair() -> None:
    """Pair workers with users: a paired worker may run a user's private jobs.

    USER is one of this API key, as in the jobs' user_id.  PUBLIC_KEY is that of the
    worker, 64 hexadecimal digits, as `shoal join` prints it.
    """


@pair.command("create")
@click.argument("user")
@pass_api_with_json
def create_code(api: CoordinatorApi, user: str, as_json: bool) -> None:
    """Create a pairing code for one worker."""
    created = api.request(f"{PAIR_PATH}/create", {"user_id": user})
    code = created["pairing_code"]
    until = f"One worker can use this code until {created['expires_at']}:"
    show(created, as_json, code, "", until, f"  shoal join … --pairing-code {code}")


@pair.command("claim")
@click.argument("code")
@click.argument("public_key")
@pass_api_with_json
def claim_code(api: CoordinatorApi, code: str, public_key: str, as_json: bool) -> None:
    """Pair a worker by a code, as `shoal join --pairing-code` does."""
    # Codes are upper case, and the coordinator compares the case.
    body = {"pairing_code": code.upper(), "provider_pubkey": public_key}
    try:
        claimed = api.request(f"{PAIR_PATH}/claim", body)
    except ClientError as error:
        raise InvalidRequest(REFUSALS.get(str(error), str(error))) from error
    user = printable(claimed["user_id"])
    show(claimed, as_json, f"paired {printable(public_key)} with {user}")


@pair.command("ls")
@click.argument("user")
@pass_api_with_json
def list_pairs(api: CoordinatorApi, user: str, as_json: bool) -> None:
    """List a user's workers."""
    found = api.request(f"{PAIR_PATH}/list", query={"user_id": user})
    name = printable(shlex.quote(user))
    nothing = f"no paired worker; create a code with: shoal pair create {name}"
    show_table(found, as_json, PAIR_COLUMNS, found["providers"], nothing)


@pair.command("revoke")
@click.argument("user")
@click.argument("public_key")
@yes_option
@pass_api_with_json
def revoke_pair(
    api: CoordinatorApi, user: str, public_key: str, yes: bool, as_json: bool
) -> None:
    """Unpair a worker; it gets no more private jobs of the user."""
    if not yes:
        _confirm(public_key, "It gets no more private jobs of this user.")
    path = item_path(PAIR_PATH, public_key)
    revoked = api.request(path, method="DELETE", query={"user_id": user})
    show(revoked, as_json, f"revoked {revoked['provider_pubkey']}")
