"""How a worker joins, over HTTP: the command, and the command as a QR code."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from gateway.keys import request
from gateway.serving import Pool
from shoal.gateway.accounts.invitations import (
    PRINTED_LIFETIME,
    PRINTED_USES,
    printed_token,
    qr_image,
)
from shoal.gateway.context import AccountsGateway

DRAWN = {"viewBox", "fill", "d", "stroke", "class"}  # attributes that a policy permits


async def test_command_is_a_qr_code_as_well(pool: Pool) -> None:
    status, shown = await request(pool, "GET", "/admin/join")

    assert status == 200
    assert shown["qr"] == qr_image(shown["join"])
    assert len(shown["qr"]) < 5000


async def test_printed_token_is_limited_and_good_for_half_its_time(pool: Pool) -> None:
    gateway = pool.gateway
    assert gateway is not None
    admission, at = gateway.admission, gateway.clock.wall()
    accounts = gateway.select(AccountsGateway)
    admission.join_token, admission.prints_limited_tokens = "unlimited", True

    first = await printed_token(accounts)
    assert await printed_token(accounts) == first
    token = admission.tokens.by_secret(first)
    assert token is not None
    assert token.uses_max == PRINTED_USES
    assert token.expires_at is not None
    assert at < token.expires_at <= gateway.clock.wall() + PRINTED_LIFETIME
    for worn in (
        {"revoked_at": at},
        {"workers": frozenset(map(str, range(PRINTED_USES)))},
        {"expires_at": at + PRINTED_LIFETIME / 2},
    ):
        admission.tokens.update(replace(token, **worn))
        admission.last_printed = first
        assert await printed_token(accounts) != first


async def test_given_token_is_printed_as_it_is(pool: Pool) -> None:
    assert pool.gateway is not None
    pool.gateway.admission.join_token = "given"

    _, shown = await request(pool, "GET", "/admin/join")

    assert shown["token"] == "given"
    assert not list(pool.gateway.admission.tokens)


def test_image_has_no_styles_and_no_scripts() -> None:
    drawn = ElementTree.fromstring(qr_image("shoal join http://192.0.2.1:4000"))

    elements = [*drawn.iter()]
    assert {each.tag.partition("}")[2] for each in elements} == {"svg", "path"}
    assert {name for each in elements for name in each.attrib} <= DRAWN


def test_text_that_is_too_long_has_no_image() -> None:
    assert qr_image("x" * 3000) == ""
