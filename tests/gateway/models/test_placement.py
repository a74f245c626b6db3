"""Models over HTTP: what each can do, where it is, and where it would fit."""

from msgspec.structs import replace

from gateway.keys import make_key, request
from gateway.serving import Pool
from shoal.domain.worker import Hardware
from shoal.protocols.seam.peer_session import PeerJoined
from shoal.protocols.seam.session import PeerProfile

LARGE = Hardware(memory_gb=64.0, gpu_memory_gb=24.0)


def add_machine(pool: Pool, name: str, hardware: Hardware | None) -> None:
    """Let a machine with some hardware be connected."""
    assert pool.gateway is not None
    directory = pool.gateway.directory
    directory.add(name, PeerJoined(name.partition(":")[2]))
    directory.describe(name, PeerProfile("Studio", hardware))


async def test_model_is_listed_with_its_workers_and_where_it_fits(pool: Pool) -> None:
    add_machine(pool, "wire:large", LARGE)
    add_machine(pool, "wire:small", replace(LARGE, memory_gb=4.0, gpu_memory_gb=None))
    add_machine(pool, "wire:silent", replace(LARGE, memory_gb=0.0, gpu_memory_gb=None))
    add_machine(pool, "wire:unknown", None)
    add_machine(pool, "grandsage:n1", LARGE)  # has it
    async with pool.node(model="qwen3-8b"):
        await pool.wait_joined()

        status, shown = await request(pool, "GET", "/admin/models")

    assert status == 200
    (model,) = shown["data"]
    place = {"id": "grandsage:n1/qwen3-8b", "name": "Studio", "busy": 0, "slots": 8}
    assert model["workers"] == [place]
    assert (model["id"], model["size"]) == ("qwen3-8b", 4_900_000_000)
    assert model["estimated"]
    assert "chat" in model["kinds"]
    needed = "7.3 GB for the model and its contexts (estimated from its name), of"
    assert model["fits"] == [
        {"node": "wire:large", "fits": True, "why": f"{needed} 24.0 GB GPU memory"},
        {"node": "wire:small", "fits": False, "why": f"{needed} 4.0 GB memory"},
    ]


async def test_model_of_unknown_size_fits_nowhere_in_particular(pool: Pool) -> None:
    add_machine(pool, "wire:large", LARGE)
    async with pool.node():
        await pool.wait_joined()

        _, shown = await request(pool, "GET", "/admin/models")

    (model,) = shown["data"]
    assert (model["size"], model["fits"]) == (None, [])
    assert not model["estimated"]


async def test_other_keys_see_no_machines(pool: Pool) -> None:
    add_machine(pool, "wire:large", LARGE)
    machine = "ab" * 32
    key = await make_key(pool, scope="read")
    async with pool.node(machine, "qwen3-8b"):
        await pool.wait_joined()

        _, shown = await request(pool, "GET", "/admin/models", key=key)

    (model,) = shown["data"]
    assert model["fits"] == []
    assert model["workers"][0]["id"] == "grandsage:abababab…/qwen3-8b"
    assert "Studio" not in str(shown)
