"""Secrets under attack: weak ones, and guesses by the hundred."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from attacks.siege import besieged
from gateway.keys import make_key, request
from gateway.serving import Pool
from harness.profiles import some_long
from protocols.dispatch.recorded import SIGNERS
from shoal.app.server import run_coordinator
from shoal.config import ServeConfig
from shoal.config.loader import check_secrets
from shoal.config.secret_files import KEY_FILE
from shoal.domain.errors import ConfigError
from shoal.protocols import discover
from shoal.protocols.dispatch import Config

WEAK = "hunter2"
EVERYWHERE = "0.0.0.0"

WEAK_SETTINGS = [
    ("serve", "api_key"),
    ("serve", "join_token"),
    ("grandsage", "token"),
    ("macfleet", "token"),
    ("tealenet", "passcode"),
    ("dispatch", "token"),
]


async def serve(folder: Path, host: str, section: str, **secret: str) -> int:
    """Start a coordinator with a secret; return the status for its first key."""
    mine: dict[str, Any] = secret if section == "serve" else {}
    config = ServeConfig(
        host=host, port=0, data_dir=folder, drain=0.0, no_discovery=True, **mine
    )
    wires = {
        name: protocol.config(**(secret if name == section else {}))
        for name, protocol in discover().items()
    }
    async with run_coordinator(config, wires) as running, ClientSession() as session:
        headers = {"Authorization": f"Bearer {running.api_key}"}
        url = f"http://127.0.0.1:{running.port}/v1/models"
        async with session.get(url, headers=headers) as response:
            return response.status


@pytest.mark.parametrize(("section", "name"), WEAK_SETTINGS)
async def test_weak_secret_is_refused_where_others_could_guess_it(
    tmp_path: Path, section: str, name: str
) -> None:
    weak = {name: WEAK + "!"}  # a fleet's token has 8 characters
    flag = f"--{name}" if section == "serve" else f"--{section}-{name}"

    assert await serve(tmp_path / "control", "127.0.0.1", section, **weak) == 200
    with pytest.raises(ConfigError, match=f"{flag.replace('_', '-')}: .*openssl"):
        await serve(tmp_path / "attacked", EVERYWHERE, section, **weak)

    assert not (tmp_path / "attacked").exists()


async def test_weak_secret_of_an_earlier_start_is_refused(tmp_path: Path) -> None:
    assert await serve(tmp_path, "127.0.0.1", "serve", api_key=WEAK) == 200

    with pytest.raises(ConfigError, match=f"{KEY_FILE} .*could guess this secret"):
        await serve(tmp_path, EVERYWHERE, "serve")


def test_what_a_server_elsewhere_asks_for_is_not_judged() -> None:
    check_secrets("serve", ServeConfig(store="postgresql://shoal@db/shoal"))


GUESSES = [30, 300]  # well within the minute after which ten more are tried
CREATE, CLAIM = "/v1/trust/create", "/v1/trust/claim"
OPEN = {"dispatch": Config(open=True)}
PROXY = ("127.0.0.1",)
WORKER = SIGNERS["A"].public_key.hex()


async def code_of(pool: Pool) -> str:
    """Return a new pairing code."""
    status, answer = await request(pool, "POST", CREATE, {"user_id": "ada"})
    assert status == 201
    return str(answer["pairing_code"])


async def claim(pool: Pool, code: str, *forwarded: str) -> int:
    """Claim a code, through a proxy that appends these addresses; return the status."""
    body = {"pairing_code": code, "provider_pubkey": WORKER}
    headers = {"X-Forwarded-For": ", ".join(forwarded)} if forwarded else {}
    async with pool.session.post(
        pool.url + CLAIM, json=body, headers=headers
    ) as response:
        return response.status


def wrong_codes(code: str, number: int) -> Iterator[str]:
    """Return wrong codes of the length of a right one, of which no two begin alike."""
    for guess in range(number):
        digits = f"{(int(code, 16) + (guess + 1) * 16 ** (len(code) - 5)):X}"
        yield digits[-len(code) :].zfill(len(code))


@pytest.mark.parametrize("guesses", some_long(GUESSES, short=1))
async def test_right_code_is_refused_to_who_has_guessed(
    guesses: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with besieged(tmp_path / "control", caplog, wires=OPEN) as pool:
        assert await claim(pool, await code_of(pool)) == 200

    async with besieged(tmp_path / "attacked", caplog, wires=OPEN) as pool:
        key = await make_key(pool)
        code = await code_of(pool)
        answers = [await claim(pool, guess) for guess in wrong_codes(code, guesses)]

        assert answers.count(400) == 10
        assert answers.count(429) == guesses - 10
        assert await claim(pool, code) == 429
        # Keys are none of the codes' business.
        assert (await request(pool, "GET", "/v1/models", key=key))[0] == 200


async def test_client_of_a_trusted_proxy_is_blocked_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with besieged(tmp_path, caplog, wires=OPEN, trusted_proxy=PROXY) as pool:
        code = await code_of(pool)
        for number, guess in enumerate(wrong_codes(code, 30)):
            # What the client itself claims does not count.
            await claim(pool, guess, f"192.0.2.{number}", "2001:db8:0:5::1")

        assert await claim(pool, code, "192.0.2.99", "2001:db8:0:6::1") == 429
        assert await claim(pool, code, "2001:db8:1::1") == 200


async def test_addresses_that_nobody_vouches_for_do_not_help_a_guesser(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with besieged(tmp_path, caplog, wires=OPEN) as pool:
        code = await code_of(pool)
        answers = [
            await claim(pool, guess, f"192.0.2.{number}")
            for number, guess in enumerate(wrong_codes(code, 30))
        ]

        assert answers == [400] * 10 + [429] * 20
        assert await claim(pool, code, "192.0.2.99") == 429


async def test_guesses_from_many_addresses_have_one_budget(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with besieged(tmp_path, caplog, wires=OPEN, trusted_proxy=PROXY) as pool:
        key = await make_key(pool)
        code = await code_of(pool)
        answers = [
            await claim(pool, guess, f"10.0.0.{number}")
            for number, guess in enumerate(wrong_codes(code, 130))
        ]

        assert answers == [400] * 100 + [429] * 30
        assert await claim(pool, code, "198.51.100.1") == 429
        assert (await request(pool, "GET", "/v1/models", key=key))[0] == 200
