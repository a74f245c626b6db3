"""Pairs workers with users by codes: a paired worker may run private jobs."""

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Raw, UnsetType

from shoal.domain.credentials import Scope
from shoal.domain.errors import InvalidRequest, NotFound, RateLimited
from shoal.gateway.context import PaidJobsGateway
from shoal.gateway.http.access import ApiCaller
from shoal.gateway.http.decoding import decode, read_query
from shoal.gateway.http.errors import PLAIN_ERRORS
from shoal.gateway.http.operation import Operations
from shoal.gateway.jobs.job_request import USER_MAX, UserId, decode_user, is_falsy
from shoal.gateway.jobs.job_view import format_time
from shoal.gateway.jobs.submit_job import read_json_body
from shoal.ledger.canonical import to_time
from shoal.ledger.keys import is_valid_key, public_key_of
from shoal.pool.inputs import WorkerPaired, WorkerUnpaired
from shoal.pool.trust import pairing_rejection
from shoal.protocols.seam.admission import token_matches
from shoal.store.port import PairingCode

api = Operations(PLAIN_ERRORS)

PUBLIC_KEY = "(?!create$|claim$|list$)[^{}/]+"  # not the API's other paths
CODE_DIGITS = 15  # hexadecimal, as in the original's codes of 6: 60 bits
BEGINNING = 5  # digits that a code is looked up by; guesses at the rest are counted
LIFETIME = 3600.0  # seconds
WAITING_MAX = 100  # unclaimed codes of one key
PAIRED_MAX = 10_000  # workers paired with the users of one key; all are in memory
BODY_MAX = 4096  # bytes; claims need no key
DRAWS_MAX = 10  # codes drawn until one is unused

MISSING_USER = "Missing user_id"
MISSING_QUERY = "Missing user_id query param"
MISSING_CLAIM = "Missing pairing_code or provider_pubkey"
INVALID = "invalid_code"
CLAIMED = "already_claimed"
EXPIRED = "expired"
NOT_PAIRED = "this worker is not paired with the user"
UNPROVEN = "unproven_key"


class CreateCode(msgspec.Struct, frozen=True):
    """The user whose private jobs the claiming worker may run; required."""

    user_id: UserId | UnsetType = UNSET


class CodeCreated(msgspec.Struct, frozen=True):
    pairing_code: str
    expires_at: str  # ISO 8601, in UTC


class ClaimCode(msgspec.Struct, frozen=True):
    """A worker's claim of a code; both fields are required.

    The key is the Ed25519 public key that the worker registers with.
    """

    pairing_code: str | None = None
    provider_pubkey: (
        Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9a-fA-F]{64}$"})] | None
    ) = None


class CodeClaimed(msgspec.Struct, frozen=True):
    user_id: str
    paired_at: str  # ISO 8601, in UTC


class PairedProvider(msgspec.Struct, frozen=True):
    provider_pubkey: str
    paired_at: str  # YYYY-MM-DD HH:MM:SS, in UTC


class ProviderList(msgspec.Struct, frozen=True):
    providers: list[PairedProvider]


class PairingRevoked(msgspec.Struct, frozen=True):
    user_id: str
    provider_pubkey: str


class ProviderQuery(msgspec.Struct, frozen=True):
    """The user of the workers; required."""

    user_id: Annotated[str, Meta(max_length=USER_MAX)] | UnsetType = UNSET


_SEPARATORS = {ord(each): None for each in " -\t\n"}  # as people write codes

_creates = msgspec.json.Decoder(CreateCode)
_claims = msgspec.json.Decoder(ClaimCode)


@api.post(
    "/v1/trust/create",
    "Create a pairing code",
    Scope.USE,
    body=CreateCode,
    status=201,
    secret=True,
)
async def create_pairing_code(
    gateway: PaidJobsGateway, request: web.Request, caller: ApiCaller
) -> CodeCreated:
    body = decode(_creates, await read_json_body(gateway, request, BODY_MAX) or b"{}")
    if not isinstance(body.user_id, Raw) or is_falsy(body.user_id, "user_id"):
        raise InvalidRequest(MISSING_USER, "user_id")
    user = decode_user(body.user_id)
    # The key may have been revoked while the body was read.
    gateway.access.ensure_active(caller)
    at = gateway.clock.wall()
    if await gateway.store.pairing.count_claimable(caller.name, at) >= WAITING_MAX:
        raise RateLimited(
            f"{WAITING_MAX} pairing codes of this key are unclaimed: use those, "
            "or try again when one has expired",
            int(LIFETIME),
        )
    if await gateway.store.pairing.count_paired(caller.name) >= PAIRED_MAX:
        raise InvalidRequest(
            f"{PAIRED_MAX} workers are paired with the users of this key: pair more "
            "under another key"
        )
    code = await _new_code(gateway, caller.name, user, at + LIFETIME)
    return CodeCreated(code.code, to_time(code.expires_at))


async def _new_code(
    gateway: PaidJobsGateway, owner: str, user: str, expires_at: float
) -> PairingCode:
    for _ in range(DRAWS_MAX):
        drawn = gateway.new_secret()[:CODE_DIGITS].upper()
        code = PairingCode(drawn, owner, user, expires_at)
        if await gateway.store.pairing.add(code):
            return code
    raise RateLimited("too many unclaimed pairing codes: try again shortly")


@api.post("/v1/trust/claim", "Pair a worker by a code", body=ClaimCode)
async def claim_pairing_code(
    gateway: PaidJobsGateway, request: web.Request
) -> CodeClaimed:
    # The pairing code is the credential.
    body = decode(_claims, await read_json_body(gateway, request, BODY_MAX) or b"{}")
    if not body.pairing_code or not body.provider_pubkey:
        raise InvalidRequest(MISSING_CLAIM)
    pairing, at = gateway.store.pairing, gateway.clock.wall()
    presented = body.pairing_code.translate(_SEPARATORS).upper()
    beginning = presented[:BEGINNING]
    gateway.access.check_code(request, presented, beginning)
    # A shorter one is the beginning of many codes, and none itself.
    similar = await pairing.find(beginning) if len(presented) > BEGINNING else []
    found = next(
        (each for each in similar if token_matches(presented, each.code)), None
    )
    if found is None:
        await gateway.access.record_wrong_code(request, beginning)
        raise InvalidRequest(INVALID, "pairing_code")
    if found.claimed_at is not None:
        # The claim may have been interrupted before the worker was trusted.
        await _record_pairing(gateway, found, found.public_key)
        raise InvalidRequest(CLAIMED, "pairing_code")
    if at >= found.expires_at:
        raise InvalidRequest(EXPIRED, "pairing_code")
    public_key = _public_key(body.provider_pubkey)
    if (reason := pairing_rejection(gateway.hub.pool, public_key)) is not None:
        # The worker would get no private job; the code can still be claimed.
        raise InvalidRequest(f"{UNPROVEN}: {reason}", "provider_pubkey")
    if not await pairing.claim(found.code, public_key, at):
        raise InvalidRequest(CLAIMED, "pairing_code")  # a moment ago
    await _record_pairing(gateway, found, public_key)
    return CodeClaimed(found.user, to_time(at))


def _public_key(text: str) -> str:
    key = public_key_of(text)
    if key is None:
        raise InvalidRequest(
            "provider_pubkey: expected an Ed25519 public key of 64 hexadecimal digits",
            "provider_pubkey",
        )
    if not is_valid_key(key):
        raise InvalidRequest(
            "provider_pubkey: ownership of this key cannot be proven: create another",
            "provider_pubkey",
        )
    return key.hex()


async def _record_pairing(
    gateway: PaidJobsGateway, code: PairingCode, public_key: str
) -> None:
    await gateway.hub.process(WorkerPaired(code.owner, code.user, public_key))


@api.get("/v1/trust/list", "List a user's workers", Scope.READ, query=ProviderQuery)
async def list_providers(
    gateway: PaidJobsGateway, request: web.Request, caller: ApiCaller
) -> ProviderList:
    user = request.query.get("user_id", "")
    if not user:
        raise InvalidRequest(MISSING_QUERY, "user_id")
    workers = await gateway.store.pairing.paired_workers(caller.name, user)
    return ProviderList(
        [
            PairedProvider(each.public_key, format_time(each.paired_at))
            for each in workers
        ]
    )


@api.delete(
    "/v1/trust/{provider_pubkey}",
    "Unpair a worker",
    Scope.USE,
    pattern=PUBLIC_KEY,
    query=ProviderQuery,
)
async def revoke_pairing(
    gateway: PaidJobsGateway,
    request: web.Request,
    caller: ApiCaller,
    provider_pubkey: str,
) -> PairingRevoked:
    user = read_query(request, ProviderQuery).user_id
    if not isinstance(user, str) or not user:
        raise InvalidRequest(MISSING_QUERY, "user_id")
    public_key = _public_key(provider_pubkey)
    if public_key not in gateway.hub.pool.trusted_keys.get((caller.name, user), ()):
        raise NotFound(NOT_PAIRED)
    await gateway.hub.process(WorkerUnpaired(caller.name, user, public_key))
    return PairingRevoked(user, public_key)
