"""Finding the peers that share a model, over HTTP."""

import asyncio
from pathlib import Path

from gateway.serving import Pool
from shoal.domain.model_messages import ModelAnswer, ModelMessage, ModelQuery
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.seam.session import PeerProfile


async def test_peers_that_share_a_model_are_listed_with_their_addresses(
    pool: Pool, tmp_path: Path
) -> None:
    assert pool.gateway is not None
    sharing, directory = pool.gateway.sharing, pool.gateway.directory

    def peer(name: str, size: int | None) -> None:
        def send(message: ModelMessage) -> bool:
            assert isinstance(message, ModelQuery)
            answer = ModelAnswer(message.model, size is not None, size)
            loop = asyncio.get_running_loop()
            loop.call_soon(sharing.sources.receive, name, answer)
            return True

        sharing.on_peer_joined(name, send)

    peer("wire:ab", 4831838208)
    peer("wire:cd", None)
    directory.add("wire:ab", PeerJoined("ab"), "tcp://192.0.2.1:41234")
    directory.describe("wire:ab", PeerProfile("Studio"))

    async with pool.session.get(
        f"{pool.url}/admin/models/mlx-community%2FQwen3-8B-4bit",
        headers=pool.headers(),
    ) as response:
        found = await response.json()

    assert found == {
        "model": "mlx-community/Qwen3-8B-4bit",
        "asked": 2,
        "data": [
            {
                "peer": "wire:ab",
                "name": "Studio",
                "size": 4831838208,
                "address": "tcp://192.0.2.1:41234",
                "passed_on": False,
            }
        ],
    }


async def test_invalid_name_is_refused(pool: Pool) -> None:
    async with pool.session.get(
        f"{pool.url}/admin/models/{'x' * 300}", headers=pool.headers()
    ) as response:
        assert response.status == 400
