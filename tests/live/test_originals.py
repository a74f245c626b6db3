"""Imitations of TealeNet's original programs, with real Shoal processes."""

import asyncio
import base64
import json
from typing import Any

import pytest

from harness.plain_http import NO_CERTIFICATES
from harness.slow_imports import openai
from harness.speed import scaled
from live.programs import (
    KEY,
    PATIENCE,
    TINY,
    GatedModel,
    Pool,
    Programs,
    eventually,
)
from models.tiny_answers import ANSWERS
from originals.mac import Mac
from originals.relay import OriginalRelay
from originals.relay_peers import ForgedPeer, RustGateway, RustNode

STORY = "Tell me a story."
MODEL = "mlx-community/Qwen3-8B-4bit"
A, B, C = (bytes([byte] * 32) for byte in (0x11, 0x22, 0x33))


def lan_port(pool: Pool) -> int:
    port: int = pool.ready["ports"]["tealenet"]
    return port


def relay_url(pool: Pool) -> str:
    return pool.url.replace("http", "ws", 1) + "/ws"


async def chat(pool: Pool, model: str, question: str = STORY) -> str:
    client = openai.AsyncOpenAI(
        base_url=f"{pool.url}/v1",
        api_key=KEY,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=NO_CERTIFICATES),
    )
    async with client, asyncio.timeout(PATIENCE):
        answer = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
        )
        text = answer.choices[0].message.content
        assert text is not None
        return text


async def until_offered(pool: Pool, model: str) -> None:
    """Wait until the coordinator has a worker for a model."""

    def offered() -> bool:
        with pool.client() as client:
            return model in [each.id for each in client.models.list()]

    await asyncio.to_thread(eventually, offered, f"{model} is offered")


async def until_workers(pool: Pool, count: int) -> None:
    """Wait until the coordinator has ``count`` workers."""
    await asyncio.to_thread(
        eventually, lambda: len(pool.workers()) == count, f"{count} workers"
    )


async def provider(gateway: RustGateway, model: str) -> str:
    """Return the first node that offers a model."""
    while True:
        for node_id, peer in (await gateway.discover()).items():
            if model in peer["capabilities"]["loadedModels"]:
                return node_id
        await asyncio.sleep(0.2)


async def test_a_mac_that_dials_serves_the_pool(programs: Programs) -> None:
    pool = programs.serve("--tealenet-open")
    mac = Mac([MODEL], ["One ", "two ", "three"])

    async with mac.dialled(lan_port(pool)):
        await until_offered(pool, MODEL)
        assert await chat(pool, MODEL) == "One two three"
        (worker,) = pool.workers()
        (peer,) = pool.admin("status")["peers"]

    assert mac.dropped == []
    assert worker["peer_name"] == peer["name"] == "Studio"
    hardware = peer["hardware"]
    assert (hardware["chip"], hardware["memory_gb"]) == ("Apple M2 Pro", 32.0)


async def test_a_mac_that_is_dialled_serves_the_pool(programs: Programs) -> None:
    mac = Mac([MODEL], ["One ", "two ", "three"], passcode="hunter2")
    async with mac.listening() as port:
        flags = ("--tealenet-passcode", "hunter2")
        pool = programs.serve("--tealenet-peers", f"127.0.0.1:{port}", *flags)
        await until_offered(pool, MODEL)

        assert await chat(pool, MODEL) == "One two three"

        hello = await mac.until("hello")
        assert hello["deviceInfo"]["hardware"]["totalRAMGB"] > 0
    assert mac.dropped == []


async def test_macs_and_peers_of_the_document_share_a_cluster(
    programs: Programs,
) -> None:
    mac, flat = Mac(["a"], ["wrapped"]), Mac(["b"], ["flat"], flat=True)
    dialling = Mac(["c"], ["flat, too"], flat=True)
    async with mac.listening() as mac_port, flat.listening() as flat_port:
        peers = f"127.0.0.1:{mac_port},127.0.0.1:{flat_port}"
        pool = programs.serve("--tealenet-open", "--tealenet-peers", peers)
        async with dialling.dialled(lan_port(pool)):
            for model, answer in (("a", "wrapped"), ("b", "flat"), ("c", "flat, too")):
                await until_offered(pool, model)
                assert await chat(pool, model) == answer
            for peer, model in ((mac, "b"), (flat, "a"), (dialling, "a")):
                await peer.until_eligible(model)
                request_id = peer.submit(model, STORY)
                await peer.until("inferenceComplete")
                assert peer.answer_to(request_id) in ("wrapped", "flat")

    assert mac.dropped == dialling.dropped == []
    # The wrapped hellos, until it has answered.
    assert {each.partition(":")[0] for each in flat.dropped} == {"unexpected key"}


async def test_a_mac_with_another_passcode_is_disconnected(programs: Programs) -> None:
    pool = programs.serve("--tealenet-passcode", "hunter2")
    mac = Mac([MODEL], passcode="hunter3")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(scaled(3)), mac.dialled(lan_port(pool)):
            pass

    assert mac.received == []
    await asyncio.to_thread(
        eventually, lambda: "passcode" in pool.program.errors, "it says why"
    )


async def test_a_mac_submits_a_job(programs: Programs) -> None:
    pool = programs.serve("--tealenet-open")
    await asyncio.to_thread(pool.joined, "one")
    mac = Mac()

    async with mac.dialled(lan_port(pool)):
        hello = await mac.until("helloAck")
        assert hello["loadedModels"] == ["tiny"]
        request_id = mac.submit("tiny", STORY, temperature=0)
        done = await mac.until("inferenceComplete")

    assert done["requestID"].upper() == request_id
    assert mac.answer_to(request_id) == ANSWERS[STORY]
    assert mac.dropped == []


async def test_a_mac_chooses_a_pool_that_has_a_free_slot(programs: Programs) -> None:
    slow = RustNode(A, [MODEL], pause=1.0)
    pool = programs.serve("--tealenet-open", "--relay-open")
    mac = Mac()

    async with mac.dialled(lan_port(pool)), slow.joined(relay_url(pool)):
        await asyncio.to_thread(pool.joined, "one")
        await until_offered(pool, MODEL)
        await mac.until_eligible("tiny")  # offers are announced once a second
        mac.submit(MODEL, STORY)
        await mac.until("inferenceChunk")
        await mac.until("heartbeat", 1 + len(mac.heartbeats))
        assert mac.would_choose("tiny")
        await mac.until("inferenceComplete")

    assert mac.dropped == []


async def test_a_mac_gets_the_reason_of_a_rejection(programs: Programs) -> None:
    pool = programs.serve("--tealenet-open")
    mac = Mac()

    async with mac.dialled(lan_port(pool)):
        request_id = mac.submit("absent-model", STORY)
        error = await mac.until("inferenceError")

    assert error["requestID"].upper() == request_id
    assert "absent-model" in error["errorMessage"]


async def test_queries_are_answered_during_an_answer(
    programs: Programs,
) -> None:
    pool = programs.serve("--tealenet-open")
    await asyncio.to_thread(pool.joined, "one")
    mac = Mac()

    async with mac.dialled(lan_port(pool)):
        mac.submit("tiny", STORY, temperature=0)
        mac.send("modelQuery", {"modelID": "absent/model"})
        response = await mac.until("modelQueryResponse")
        order = [kind for kind, _ in mac.received]
        await mac.until("inferenceComplete")

    assert (response["modelID"], response["available"]) == ("absent/model", False)
    assert "inferenceComplete" not in order


async def test_a_rust_node_on_the_relay_serves_the_pool(programs: Programs) -> None:
    pool = programs.serve("--tealenet-open", "--relay-open")
    node = RustNode(A, [MODEL], pieces=["One ", "two"])

    async with node.joined(relay_url(pool)):
        await until_offered(pool, MODEL)
        assert await chat(pool, MODEL) == "One two"

    assert node.served[0]["streaming"] is True
    assert node.served[0]["request"]["stream_options"] == {"include_usage": True}


async def test_peers_of_the_document_meet_through_the_relay(
    programs: Programs,
) -> None:
    pool = programs.serve("--tealenet-open", "--relay-open")
    node, gateway = RustNode(A, [MODEL], flat=True), RustGateway(B, flat=True)
    await asyncio.to_thread(pool.joined, "one")

    async with node.joined(relay_url(pool)), gateway.joined(relay_url(pool)):
        await until_offered(pool, MODEL)
        assert await chat(pool, MODEL) == "Hello"

        async with asyncio.timeout(PATIENCE):
            node_id = await provider(gateway, "tiny")
        answer = await gateway.chat(node_id, "tiny", STORY)

    assert text_of(answer) == ANSWERS[STORY]


async def test_nobody_is_offered_a_model_twice(programs: Programs) -> None:
    pool = programs.serve("--tealenet-open", "--relay-open")
    node, gateway = RustNode(A, [MODEL]), RustGateway(B)
    mac = Mac(["mac-model"])

    async with (
        node.joined(relay_url(pool)),
        gateway.joined(relay_url(pool)),
        mac.dialled(lan_port(pool)),
    ):
        await until_offered(pool, MODEL)
        await until_offered(pool, "mac-model")
        async with asyncio.timeout(PATIENCE):
            while MODEL not in mac.offered:
                await mac.until("heartbeat", 1 + len(mac.heartbeats))
            await provider(gateway, "mac-model")

        assert "mac-model" not in mac.offered
        models = {
            node_id: peer["capabilities"]["loadedModels"]
            for node_id, peer in (await gateway.discover()).items()
        }
        ours = [each for each in models if each != node.node_id]
        assert models.pop(node.node_id) == [MODEL]
        assert models == {ours[0]: ["mac-model"]}
        request_id = mac.submit("mac-model", STORY)
        error = await mac.until("inferenceError")

    assert error["requestID"].upper() == request_id
    assert mac.dropped == []


async def test_an_unadmitted_node_gets_no_jobs(programs: Programs) -> None:
    pool = programs.serve("--relay-open")
    node = RustNode(A, [MODEL])

    def refused_peers() -> list[dict[str, str]]:
        peers: list[dict[str, str]] = pool.admin("status")["refused"]
        return peers

    async with node.joined(relay_url(pool)):
        await asyncio.to_thread(pool.joined, "one")
        await asyncio.to_thread(eventually, refused_peers, "the node is refused")
        (refused,) = refused_peers()
        assert [each["id"] for each in pool.workers()] == ["shoal:one/tiny"]

    assert refused["id"] == f"tealenet:{node.node_id}"
    assert "--tealenet-open" in refused["reason"]


async def test_a_gateway_on_the_relay_submits_a_job(programs: Programs) -> None:
    pool = programs.serve("--tealenet-open", "--relay-open")
    await asyncio.to_thread(pool.joined, "one")
    gateway = RustGateway(B)

    async with gateway.joined(relay_url(pool)):
        async with asyncio.timeout(PATIENCE):
            node_id = await provider(gateway, "tiny")
        answer = await gateway.chat(node_id, "tiny", STORY)

    assert text_of(answer) == ANSWERS[STORY]
    assert list(answer[-1]) == ["inferenceComplete"]


@pytest.mark.parametrize("flat", [False, True])
async def test_a_worker_serves_a_gateway_on_the_original_relay(
    programs: Programs, flat: bool
) -> None:
    relay, gateway = OriginalRelay(), RustGateway(B, flat=flat)
    async with relay.serving() as url, gateway.joined(url):
        worker = programs.run(
            *("join", url, "--wire", "tealenet", "--json", "--name", "one"),
            *("--model", f"tiny={TINY}"),
        )
        await asyncio.to_thread(worker.event, "joined")
        await gateway.until("peerJoined")
        peers = await gateway.discover()
        (found,) = peers.values()
        assert found["capabilities"]["loadedModels"] == ["tiny"]

        answer = await gateway.chat(found["nodeID"], "tiny", STORY)

    assert text_of(answer) == ANSWERS[STORY]


async def test_a_forged_registration_does_not_end_a_worker(programs: Programs) -> None:
    relay, gateway = OriginalRelay(), RustGateway(B)
    async with relay.serving() as url, gateway.joined(url):
        worker = programs.run(
            *("join", url, "--wire", "tealenet", "--json", "--name", "one"),
            *("--model", f"tiny={TINY}"),
        )
        await asyncio.to_thread(worker.event, "joined")
        await gateway.until("peerJoined")
        (node_id,) = await gateway.discover()

        async with ForgedPeer(A, victim=node_id).joined(url):
            await asyncio.to_thread(worker.event, "lost")
            await asyncio.to_thread(worker.event, "joined")

        answer = await gateway.chat(node_id, "tiny", STORY)

    assert text_of(answer) == ANSWERS[STORY]
    assert "forged registration" in worker.errors


async def test_a_worker_replaces_a_node_with_its_server_and_its_id(
    programs: Programs, slow_model: GatedModel
) -> None:
    slow_model.go_on.set()
    node = RustNode(A, ["tiny"])
    public = bytes.fromhex(node.node_id)
    identity = programs.folder / "worker.json"
    pair = {"publicKey": [*public], "secretKey": [*(A + public)]}
    identity.write_text(json.dumps(pair))
    identity.chmod(0o600)
    relay, gateway = OriginalRelay(), RustGateway(B)

    async with relay.serving() as url, gateway.joined(url):
        worker = programs.run(
            *("join", url, "--wire", "tealenet", "--json", "--name", "one"),
            *slow_model.flags,
            *("--identity", str(identity)),
        )
        await asyncio.to_thread(worker.event, "joined")
        answer = await gateway.chat(node.node_id, "tiny", STORY)

    assert text_of(answer) == ANSWERS[STORY]


async def test_a_coordinator_uses_a_node_on_the_original_relay(
    programs: Programs,
) -> None:
    relay, node = OriginalRelay(), RustNode(A, [MODEL], pieces=["One ", "two"])
    async with relay.serving() as url, node.joined(url):
        pool = programs.serve("--tealenet-open", "--tealenet-relays", url)
        await until_offered(pool, MODEL)

        assert await chat(pool, MODEL) == "One two"


async def test_a_node_that_leaves_is_replaced_without_a_gap(programs: Programs) -> None:
    pieces = [f"word{number} " for number in range(40)]
    pool = programs.serve("--tealenet-open", "--relay-open")
    first = RustNode(A, [MODEL], pieces=pieces, pause=0.02)
    second = RustNode(B, [MODEL], pieces=pieces)

    async with second.joined(relay_url(pool)):
        async with first.joined(relay_url(pool)):
            await until_offered(pool, MODEL)
            answers = [asyncio.create_task(chat(pool, MODEL)) for _ in range(2)]
            await first.until("relayData")
            await asyncio.sleep(0.2)
        texts = await asyncio.gather(*answers)

    assert texts == ["".join(pieces)] * 2


async def test_an_answer_whose_model_server_died_is_taken_over(
    programs: Programs,
) -> None:
    pool = programs.serve("--tealenet-open", "--relay-open")
    dying = RustNode(A, [MODEL], pieces=["One ", "two"], server_dies_after=1)
    healthy = RustNode(B, [MODEL], pieces=["One ", "two"], pause=0.2)

    async with dying.joined(relay_url(pool)), healthy.joined(relay_url(pool)):
        await until_workers(pool, 2)
        texts = await asyncio.gather(*(chat(pool, MODEL) for _ in range(2)))

    assert texts == ["One two"] * 2
    assert dying.served


async def test_jobs_of_nodes_whose_model_server_fails_go_to_another(
    programs: Programs,
) -> None:
    pool = programs.serve("--tealenet-open", "--relay-open")
    down = RustNode(A, [MODEL], server_down=True)
    crashing = RustNode(B, [MODEL], server_refuses=(500, "out of cheese"))
    healthy = RustNode(C, [MODEL], pieces=["One ", "two"], pause=0.2)

    async with (
        down.joined(relay_url(pool)),
        crashing.joined(relay_url(pool)),
        healthy.joined(relay_url(pool)),
    ):
        await until_workers(pool, 3)
        texts = await asyncio.gather(*(chat(pool, MODEL) for _ in range(3)))

    assert texts == ["One two"] * 3
    assert down.served
    assert crashing.served


async def test_a_request_that_a_model_server_refuses_is_the_clients_error(
    programs: Programs,
) -> None:
    pool = programs.serve("--tealenet-open", "--relay-open")
    body = '{"error":{"code":422,"message":"no such grammar","path":"/srv/llama"}}'
    node = RustNode(A, [MODEL], server_refuses=(422, body))

    async with node.joined(relay_url(pool)):
        await until_offered(pool, MODEL)
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            await chat(pool, MODEL)

    assert refused.value.body == {
        "message": "no such grammar",
        "type": "invalid_request_error",
        "param": None,
        "code": "unprocessable",
    }
    assert len(node.served) == 1


async def test_the_original_relay_cannot_read_shoal_messages(
    programs: Programs,
) -> None:
    relay = OriginalRelay()
    async with relay.serving() as url:
        pool = programs.serve("--tealenet-open", "--tealenet-relays", url)
        worker = programs.run(
            *("join", url, "--wire", "tealenet", "--json", "--name", "one"),
            *("--model", f"tiny={TINY}"),
        )
        await asyncio.to_thread(worker.event, "joined")
        await until_offered(pool, "tiny")
        assert await chat(pool, "tiny") == ANSWERS[STORY]

    forwarded = [
        payload["data"] for kind, payload in relay.forwarded if "data" in payload
    ]
    assert forwarded
    relayed = b"".join(base64.b64decode(each) for each in forwarded)
    assert b"inferenceRequest" not in relayed
    assert STORY.encode() not in relayed
    assert ANSWERS[STORY][:20].encode() not in relayed


def text_of(answer: list[dict[str, Any]]) -> str:
    """Return the text of an answer's chunks."""
    text = ""
    for message in answer:
        for choice in (
            message.get("inferenceChunk", {}).get("chunk", {}).get("choices", [])
        ):
            text += choice["delta"].get("content") or ""
    return text
