"""Pair workers with users: a paired worker may run a user's private jobs."""

import argparse
import json
import shlex
from urllib.parse import quote, urlencode

from shoal.cli import api
from shoal.cli.arguments import add_action
from shoal.cli.credentials import confirm_revocation
from shoal.cli.terminal import print_table, printable
from shoal.cli.worker.pairing import pairing_wires

PATH = "/v1/trust"
HEAD = ("WORKER", "PAIRED")
USER_HELP = "user of this API key, as in the jobs' user_id"
REFUSALS = {
    "invalid_code": "there is no such code; a new one: shoal pair create USER",
    "already_claimed": "the code has been used; a new one: shoal pair create USER",
    "expired": "the code has expired; a new one: shoal pair create USER",
}
"""Explanations of the coordinator's refusals of a code."""

KEY_HELP = "public key of the worker, 64 hexadecimal digits, as `shoal join` prints it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = add_action(actions, "create", "create a pairing code for one worker")
    claim = add_action(
        actions, "claim", "pair a worker by a code; `shoal join --pairing-code` does it"
    )
    listing = add_action(actions, "ls", "list a user's workers")
    revoke = add_action(
        actions, "revoke", "unpair a worker; it gets no more private jobs of the user"
    )
    for each in (create, listing, revoke):
        each.add_argument("user", help=USER_HELP)
    claim.add_argument("code", help="code, from `shoal pair create`")
    for each in (claim, revoke):
        each.add_argument("name", metavar="PUBLIC_KEY", help=KEY_HELP)
    revoke.add_argument(
        "--yes",
        action="store_true",
        help="no confirmation; without a terminal there is none in any case",
    )
    for each in (create, claim, listing, revoke):
        each.add_argument("--json", action="store_true", help="print JSON")
        api.add_arguments(each)


def run(args: argparse.Namespace) -> int:
    return {"create": _create, "claim": _claim, "ls": _list, "revoke": _revoke}[
        args.action
    ](args)


def _create(args: argparse.Namespace) -> int:
    created = api.request(args, f"{PATH}/create", {"user_id": args.user})
    if args.json:
        print(json.dumps(created))
        return 0
    print(f"{created['pairing_code']}\n")
    print(f"One worker can use this code until {created['expires_at']}:")
    for wire in pairing_wires():
        print(f"  shoal join … --wire {wire} --pairing-code {created['pairing_code']}")
    return 0


def _claim(args: argparse.Namespace) -> int:
    # Codes are upper case, and the coordinator compares the case.
    body = {"pairing_code": args.code.upper(), "provider_pubkey": args.name}
    try:
        claimed = api.request(args, f"{PATH}/claim", body)
    except api.ApiError as error:
        raise api.ApiError(REFUSALS.get(str(error), str(error))) from error
    if args.json:
        print(json.dumps(claimed))
    else:
        print(f"paired {printable(args.name)} with {printable(claimed['user_id'])}")
    return 0


def _list(args: argparse.Namespace) -> int:
    found = api.request(args, f"{PATH}/list?{urlencode({'user_id': args.user})}")
    if args.json:
        print(json.dumps(found))
    elif found["providers"]:
        workers = found["providers"]
        rows = [(each["provider_pubkey"], each["paired_at"]) for each in workers]
        print_table(HEAD, rows)
    else:
        user = printable(shlex.quote(args.user))
        print(f"no paired worker; create a code with: shoal pair create {user}")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    if not confirm_revocation(args, "It gets no more private jobs of this user."):
        return 1
    query = urlencode({"user_id": args.user})
    path = f"{PATH}/{quote(args.name, safe='')}?{query}"
    revoked = api.request(args, path, method="DELETE")
    if args.json:
        print(json.dumps(revoked))
    else:
        print(f"revoked {revoked['provider_pubkey']}")
    return 0
