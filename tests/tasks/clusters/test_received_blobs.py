"""Large arguments as they arrive at a worker of a Dask cluster."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shoal.domain.errors import Unavailable
from shoal.tasks.on_dask import host

DIGEST = b"d" * 32


async def test_parts_of_a_request_that_was_given_up_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[Any] = []
    blobs = host.ReceivedBlobs(
        tmp_path, "tcp://here", lambda *event: requested.append(event[-1])
    )
    with monkeypatch.context() as patch:
        patch.setattr(host, "BLOB_TIMEOUT", 0.0)
        with pytest.raises(Unavailable, match="did not arrive in time"):
            await blobs.get(1, DIGEST)

    again = asyncio.create_task(blobs.get(2, DIGEST))
    await asyncio.sleep(0)  # it requests the blob
    first, second = requested
    blobs.receive(DIGEST, first, b"late", "")
    blobs.receive(DIGEST, second, b"whole", "")
    blobs.receive(DIGEST, first, b"", "")
    assert not again.done()
    blobs.receive(DIGEST, second, b"", "")

    assert (await again).read_bytes() == b"whole"
