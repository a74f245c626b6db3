"""Names, errors and answers with terminal control sequences."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from attacks.lan import dialled
from attacks.siege import join, standing
from gateway.serving import KEY, Pool, eventually
from protocols.tealenet.peers import heartbeat, hello
from shoal.cli.main import main
from shoal.protocols.tealenet.codec.envelope import encode
from shoal.protocols.tealenet.local_node import Config

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVIL = "\x1b[2J\x9b1m\x07\r\nshoal: all is well\0"
SEEN = r"\x1b[2J\x9b1m\x07\x0d"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def standing_pool(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Pool]:
    folder = tmp_path_factory.mktemp("coordinator")
    async with standing(folder, wires={"tealenet": Config(open=True)}) as running:
        yield running


@pytest.fixture
def pool(shared_pool: Pool) -> Pool:
    return shared_pool


async def command(pool: Pool, *arguments: str) -> int:
    key = ("--url", pool.url, "--api-key", KEY)
    return await asyncio.to_thread(main, [arguments[0], *key, *arguments[1:]])


def check_shown(text: str) -> None:
    assert SEEN in text
    assert text.replace("\n", "").isprintable()


async def test_control_characters_in_names_are_escaped_one_line_each(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with join(pool, EVIL, EVIL), join(pool, "n2", "m2"):
        await pool.wait_joined(2)

        assert await command(pool, "status") == 0

    shown = capsys.readouterr().out
    check_shown(shown)
    assert len(shown.splitlines()) == 4 + 2 * 3  # a machine, its wires, its models


async def test_control_characters_in_peer_names_are_escaped(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    greeting = hello(None, (EVIL,))
    device = msgspec.structs.replace(greeting.device_info, name=EVIL)
    async with dialled(pool) as peer:
        await peer.send_messages(
            encode(msgspec.structs.replace(greeting, device_info=device))
        )
        await peer.receive("helloAck")
        await peer.send_messages(encode(heartbeat((EVIL,), throttle_level=0)))
        await pool.wait_joined()
        (worker,) = pool.hub.pool.workers.values()
        await eventually(lambda: bool(worker.load.unfit))

        assert await command(pool, "status") == 0

    shown = capsys.readouterr().out
    check_shown(shown)
    assert len(shown.splitlines()) == 4 + 4  # and why it gets no jobs


async def test_control_characters_in_errors_are_escaped(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    async with join(pool, "n1", EVIL):
        await pool.wait_joined()

        assert await command(pool, "chat", "--model", "no", "hi") == 1

    check_shown(capsys.readouterr().err)


@pytest.mark.parametrize("terminal", [True, False])
async def test_control_characters_in_answers_are_escaped_only_on_terminals(
    pool: Pool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    terminal: bool,
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    async with join(pool) as node:
        await pool.wait_joined()
        chatting = asyncio.create_task(command(pool, "chat", "hi"))
        await node.answer(EVIL)

        assert await chatting == 0

    shown = capsys.readouterr().out
    if terminal:
        check_shown(shown)
    else:
        assert shown == EVIL + "\n"
