"""The imitations match the recorded real programs."""

import struct

import msgpack
import pytest

from originals.macfleet import (
    Frame,
    PeerTransport,
    PoolAgent,
    RemoteTaskError,
    TaskDispatcher,
    TaskWorker,
    fleet_key,
    hardware_json,
    packed,
    peel,
    suffix,
)
from protocols.macfleet.recorded import Case, recorded

TOKEN = "vector-token-0001"


@recorded("key_derivation")
def test_keys_are_as_recorded(case: Case) -> None:
    token, fleet = case["input"].get("token"), case["input"].get("fleet_id")
    expected = case["expect"].get("fleet_key_hex")
    if token and expected:
        assert fleet_key(token, fleet or "").hex() == expected


@recorded("frame")
def test_frames_are_as_recorded(case: Case) -> None:
    given = case["input"]
    frame = Frame(
        given["stream_id"],
        given["msg_type"],
        given["flags"],
        given["sequence"],
        bytes.fromhex(given["payload_hex"]),
    )

    assert frame.packed().hex() == case["expect"]["wire_hex"]


@recorded("hw_suffix")
def test_suffixes_are_as_recorded(case: Case) -> None:
    given = case["input"]
    if given["wire_version"] != 1:
        return
    key = bytes.fromhex(given["fleet_key_hex"])
    challenge = bytes.fromhex(given["peer_challenge_hex"])
    hardware = bytes.fromhex(given["hw_json_hex"])

    made = suffix(key, challenge, given["node_id"], hardware)

    assert made.hex() == case["expect"]["suffix_hex"]
    assert peel(key, challenge, given["node_id"], b"base" + made) is not None


@recorded("task_spec")
def test_tasks_are_as_recorded(case: Case) -> None:
    expected = case["expect"].get("payload_hex")
    if expected is None:
        return
    spec = msgpack.unpackb(bytes.fromhex(expected), raw=False, strict_map_key=False)

    assert packed(spec).hex() == expected


def test_hardware_is_as_recorded() -> None:
    text = hardware_json(data_port=50062).decode()

    assert text.startswith('{"chip_name": "Apple Silicon", "data_port": 50062, ')
    assert text.endswith('"ram_gb": 8.0, "wire_version": 1}')
    assert len(struct.pack("!H", len(text))) == 2


@pytest.mark.parametrize("token", ["", TOKEN])
@pytest.mark.parametrize("v1", [False, True])
async def test_worker_and_dispatcher_interoperate(token: str, v1: bool) -> None:
    remote, local = PeerTransport("w1", token), PeerTransport("d1", token, v1=v1)

    def fail() -> None:
        raise ValueError("zap")

    async with remote.listening() as port:
        connection = await local.connect("w1", port)
        worker = TaskWorker(
            await remote.connection_to("d1"), {"add": int.__add__, "fail": fail}
        )
        async with (
            worker.running(),
            TaskDispatcher([connection]).running() as dispatcher,
        ):
            assert await dispatcher.submit("add", 19, 23) == 42
            with pytest.raises(RemoteTaskError, match="zap"):
                await dispatcher.submit("fail")
            with pytest.raises(RemoteTaskError, match="Known tasks:"):
                await dispatcher.submit("nope")
        await local.disconnect()


async def test_wrong_token_is_rejected() -> None:
    remote, local = PeerTransport("w1", TOKEN), PeerTransport("d1", "another-token")

    async with remote.listening() as port:
        with pytest.raises(ConnectionError, match="correct token"):
            await local.connect("w1", port)


@pytest.mark.parametrize("token", ["", TOKEN])
async def test_agents_ping_each_other(token: str) -> None:
    remote = PoolAgent("a-1", token, data_port=50052)
    local = PoolAgent("b-2", token)

    async with remote.listening() as port:
        found = await local.ping(port)

    if token:
        assert found is not None
        assert (found["id"], found["data_port"]) == ("a-1", 50052)
    assert remote.pings == ["b-2"] or not token
