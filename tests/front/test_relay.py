"""What a front relays to the hub's process."""

import asyncio
import sys
from pathlib import Path
from typing import cast

import pytest

from shoal.front.relay import ToHub
from shoal.transports.clock import fast_loop_factory

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="fronts need Unix sockets"
)


def test_what_a_client_sends_to_a_hub_that_is_gone_is_dropped(tmp_path: Path) -> None:
    async def send() -> None:
        path = tmp_path / "hub"
        server = await asyncio.start_unix_server(lambda _, there: there.close(), path)
        reader, writer = await asyncio.open_unix_connection(path)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()

        server.close()

        to_hub = ToHub(cast(asyncio.Transport, writer.transport), writer)
        assert to_hub.feed_data(b"more") == (False, b"")
        to_hub.feed_eof()

    with asyncio.Runner(loop_factory=fast_loop_factory()) as runner:
        runner.run(send())
