import asyncio

import pytest

from shoal.transports.link import LinkClosed
from shoal.transports.local_link import ROOM, local_links


async def test_sent_messages_are_received_together() -> None:
    here, there = local_links("here", "there")

    await here.send("a")
    here.write(["b", b"c"])

    assert await there.receive() == ["a", "b", b"c"]
    assert (here.peer, there.peer) == ("there", "here")


async def test_receiver_waits_for_messages() -> None:
    here, there = local_links("here", "there")
    receiving = asyncio.create_task(there.receive())
    await asyncio.sleep(0)

    here.write(["a"])

    assert await receiving == ["a"]


async def test_sender_waits_until_most_is_read() -> None:
    here, there = local_links("here", "there")
    await here.send("x" * ROOM)
    sending = asyncio.create_task(here.send("y"))
    await asyncio.sleep(0)

    assert not sending.done()
    assert here.unread == ROOM + 1
    assert len(await there.receive()) == 2
    await sending
    assert here.unread == 0


async def test_messages_before_the_close_arrive() -> None:
    here, there = local_links("here", "there")
    here.write(["last"])
    await here.close(1001, "going")
    await here.close(1000, "again")

    assert await there.receive() == ["last"]
    with pytest.raises(LinkClosed, match="closed by peer: 1001 going") as raised:
        await there.receive()
    assert (raised.value.code, raised.value.text) == (1001, "going")
    with pytest.raises(LinkClosed, match="closed here: going"):
        await here.receive()
    with pytest.raises(LinkClosed):
        there.write(["late"])


@pytest.mark.parametrize("abruptly", [False, True])
async def test_close_releases_waiting_tasks(abruptly: bool) -> None:
    here, there = local_links("here", "there")
    receiving = asyncio.create_task(here.receive())
    sending = asyncio.create_task(here.send("x" * (ROOM + 1)))
    await asyncio.sleep(0)

    if abruptly:
        there.abort()
    else:
        await there.close(1000, "")

    await sending
    with pytest.raises(LinkClosed):
        await receiving
