"""``shoal pair``: pair workers with users, for private jobs."""

import shlex
from urllib.parse import quote

import click

from shoal.cli.access.credentials import confirm_revocation
from shoal.cli.options import json_option, pass_api, yes_option
from shoal.cli.terminal import Columns, printable, show, show_table
from shoal.client.coordinator import CoordinatorApi
from shoal.domain.errors import ClientError, InvalidRequest

PATH = "/v1/trust"
COLUMNS: Columns = {"WORKER": "provider_pubkey", "PAIRED": "paired_at"}
REFUSALS = {
    "invalid_code": "there is no such code; a new one: shoal pair create USER",
    "already_claimed": "the code has been used; a new one: shoal pair create USER",
    "expired": "the code has expired; a new one: shoal pair create USER",
}
"""Explanations of the coordinator's refusals of a code."""


@click.group("pair")
def command() -> None:
    """Pair workers with users: a paired worker may run a user's private jobs.

    USER is one of this API key, as in the jobs' user_id.  PUBLIC_KEY is that of the
    worker, 64 hexadecimal digits, as `shoal join` prints it.
    """


@command.command("create")
@click.argument("user")
@json_option
@pass_api
def create(api: CoordinatorApi, user: str, as_json: bool) -> None:
    """Create a pairing code for one worker."""
    created = api.request(f"{PATH}/create", {"user_id": user})
    code = created["pairing_code"]
    until = f"One worker can use this code until {created['expires_at']}:"
    show(created, as_json, code, "", until, f"  shoal join … --pairing-code {code}")


@command.command("claim")
@click.argument("code")
@click.argument("public_key")
@json_option
@pass_api
def claim(api: CoordinatorApi, code: str, public_key: str, as_json: bool) -> None:
    """Pair a worker by a code, as `shoal join --pairing-code` does."""
    # Codes are upper case, and the coordinator compares the case.
    body = {"pairing_code": code.upper(), "provider_pubkey": public_key}
    try:
        claimed = api.request(f"{PATH}/claim", body)
    except ClientError as error:
        raise InvalidRequest(REFUSALS.get(str(error), str(error))) from error
    user = printable(claimed["user_id"])
    show(claimed, as_json, f"paired {printable(public_key)} with {user}")


@command.command("ls")
@click.argument("user")
@json_option
@pass_api
def list_(api: CoordinatorApi, user: str, as_json: bool) -> None:
    """List a user's workers."""
    found = api.request(f"{PATH}/list", query={"user_id": user})
    name = printable(shlex.quote(user))
    nothing = f"no paired worker; create a code with: shoal pair create {name}"
    show_table(found, as_json, COLUMNS, found["providers"], nothing)


@command.command("revoke")
@click.argument("user")
@click.argument("public_key")
@yes_option
@json_option
@pass_api
def revoke(
    api: CoordinatorApi, user: str, public_key: str, yes: bool, as_json: bool
) -> None:
    """Unpair a worker; it gets no more private jobs of the user."""
    if not yes:
        confirm_revocation(public_key, "It gets no more private jobs of this user.")
    path = f"{PATH}/{quote(public_key, safe='')}"
    revoked = api.request(path, method="DELETE", query={"user_id": user})
    show(revoked, as_json, f"revoked {revoked['provider_pubkey']}")
