"""The API of invitations: the command by which a machine joins, and its token."""

import asyncio
import io

import msgspec

from shoal.domain.credentials import DAY, JoinToken, Scope
from shoal.gateway.accounts.credentials import ID_LENGTH, NewToken, add_token
from shoal.gateway.context import AccountsGateway
from shoal.gateway.http.operation import Operations

api = Operations()

PRINTED_LIFETIME = 1.0 * DAY  # seconds
PRINTED_USES = 10  # machines that may join by a printed token


class Invitation(msgspec.Struct, frozen=True):
    """How a worker joins: by ``join``, a command with the first of the URLs.

    ``urls`` are this coordinator's addresses on each network that it listens on;
    ``loopback_only``: only its own machine can reach them.  ``token`` is empty if none
    is required.  ``qr`` is ``join`` as a QR code, an SVG image; empty if it is too long
    for one.
    """

    join: str
    token: str
    urls: list[str]
    loopback_only: bool
    qr: str


@api.get("/admin/join", "Show how workers join", Scope.ADMIN, secret=True)
async def show_invitation(gateway: AccountsGateway) -> Invitation:
    admission = gateway.admission
    token = await printed_token(gateway)
    join = admission.invitation(token)
    return Invitation(
        join,
        admission.shown_token(token),
        list(admission.urls()),
        admission.loopback_only,
        await asyncio.to_thread(qr_image, join),
    )


async def printed_token(gateway: AccountsGateway) -> str:
    """Return the join token for a command that is printed; empty: none is required.

    It is the operator's own, if one was given.  Else it is one of a limited time and
    number of machines, since a command line is seen by others and copied: the last
    one, while it is good for half of that time.

    Raises StoreError.
    """
    admission = gateway.admission
    if not admission.prints_limited_tokens:
        return admission.join_token
    last = admission.tokens.by_secret(admission.last_printed)
    if last is None or not _is_good(last, gateway.clock.wall()):
        name = f"printed-{gateway.new_secret()[:ID_LENGTH]}"
        wanted = NewToken(name, PRINTED_USES, PRINTED_LIFETIME)
        admission.last_printed, _ = await add_token(gateway, wanted)
    return admission.last_printed


def _is_good(token: JoinToken, at: float) -> bool:
    assert token.expires_at is not None, "a printed token expires"
    return (
        token.revoked_at is None
        and len(token.workers) < PRINTED_USES
        and at < token.expires_at - PRINTED_LIFETIME / 2
    )


def qr_image(text: str) -> str:
    """Return a text as a QR code, an SVG image; empty if it is too long for one.

    The image has no styles and no scripts, which the dashboard's policy refuses.
    """
    import segno  # few coordinators are ever asked for a code

    try:
        code = segno.make(text, error="l", micro=False)
    except segno.DataOverflowError:
        return ""
    image = io.BytesIO()
    code.save(
        image,
        kind="svg",
        xmldecl=False,
        svgclass=None,
        lineclass=None,
        omitsize=True,
        light="#fff",
        nl=False,
    )
    return image.getvalue().decode()
