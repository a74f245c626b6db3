"""How a worker joins, over HTTP: the command, and the command as a QR code."""

import xml.etree.ElementTree as ElementTree

from gateway.keys import request
from gateway.serving import Pool
from shoal.gateway.accounts.credentials import qr_image

DRAWN = {"viewBox", "fill", "d", "stroke", "class"}  # attributes that a policy permits


async def test_command_is_a_qr_code_as_well(pool: Pool) -> None:
    status, shown = await request(pool, "GET", "/admin/join")

    assert status == 200
    assert shown["qr"] == qr_image(shown["join"])
    assert len(shown["qr"]) < 5000


def test_image_has_no_styles_and_no_scripts() -> None:
    drawn = ElementTree.fromstring(qr_image("shoal join http://192.0.2.1:4000"))

    elements = [*drawn.iter()]
    assert {each.tag.partition("}")[2] for each in elements} == {"svg", "path"}
    assert {name for each in elements for name in each.attrib} <= DRAWN


def test_text_that_is_too_long_has_no_image() -> None:
    assert qr_image("x" * 3000) == ""
