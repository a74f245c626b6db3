"""Gets a model of the hub with machines of the pool: these have its very files, or get
parts of it from the hub at the same time.

The hub says which files these are, by their SHA-256: names of models are only a guess
where they may be.
"""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from shoal.domain.errors import PeerError, ShoalError
from shoal.domain.model_messages import (
    HashingModel,
    ManifestAnswer,
    ManifestRequest,
    ModelMessage,
)
from shoal.models import manifest
from shoal.models.chunk_senders import ByteRate
from shoal.models.fetch import ModelPeer, OnProgress, fetch_model
from shoal.models.hub_source import HubSource
from shoal.models.manifest import Manifest
from shoal.models.seed_server import OpenPort

CONNECT_TIMEOUT = 5.0  # seconds
ANSWER_TIMEOUT = 20.0  # seconds without an answer, or a word that hashing goes on


async def fetch_with_pool(
    source: HubSource,
    names: Collection[str],
    peers: Sequence[ModelPeer],
    folder: Path,
    progress: OnProgress,
    *,
    open_port: OpenPort | None = None,
    rate: ByteRate | None = None,
) -> dict[str, Path] | None:
    """Fetch the files of a model into a folder; return them by their SHA-256.

    The ``peers`` are asked for models of these ``names``.  If none has exactly these
    files, they come from the hub, and machines that the peers know, and that fetch the
    model as well, swap parts with this one.  None: no peer answers, so the hub's own
    library does as well.  What has arrived of a fetch that fails stays in the folder.

    Raises ShoalError; PeerError if the files are not the hub's.
    """
    wanted = {each.sha256 for each in source.model.files}
    asked = [_find(peer, names, wanted) for peer in peers]
    answers = [*zip(peers, await asyncio.gather(*asked), strict=True)]
    answering = [peer for peer, found in answers if found is not None]
    if not answering:
        return None
    copy = next((found for _, found in answers if found), None)
    sources: list[ModelPeer] = [source]
    name, content, address = next(iter(names)), source.manifest, ""
    if copy:
        ((name, content),) = copy.items()
        address = content.address
        sources = [peer for peer, found in answers if found == copy]
    fetched = await fetch_model(
        *(name, sources, folder),
        address=address,
        replace=True,
        progress=progress,
        open_port=open_port,
        rate=rate,
        introducers=() if copy else answering,
    )
    return {each.sha256.hex(): fetched.path / each.name for each in content.files}


async def fetch_from_hub(
    source: HubSource,
    name: str,
    peers: Sequence[ModelPeer],
    folder: Path,
    progress: OnProgress,
    *,
    open_port: OpenPort | None = None,
    rate: ByteRate | None = None,
) -> None:
    """Fetch a model into its folder below ``folder``, as ``fetch_with_pool``.

    If no peer answers, it comes from the hub alone.  Raises ShoalError.
    """
    fetched = await fetch_with_pool(
        *(source, [name], peers, folder, progress), open_port=open_port, rate=rate
    )
    if fetched is None:
        await fetch_model(name, [source], folder, replace=True, progress=progress)


async def _find(
    peer: ModelPeer, names: Collection[str], wanted: Collection[str]
) -> dict[str, Manifest] | None:
    """Return the manifest of the wanted files at a peer, by their model's name, if any.

    None: it cannot be asked.
    """
    answers: asyncio.Queue[ModelMessage | ShoalError] = asyncio.Queue()
    try:
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(CONNECT_TIMEOUT):  # it may be elsewhere
                connection = await stack.enter_async_context(peer.connect())
            if not connection.sends_chunks:
                return None
            connection.receive = connection.on_lost = answers.put_nowait
            for name in names:
                connection.send(ManifestRequest(name))
                content = await _manifest(name, answers)
                files = () if content is None else content.files
                if content and {each.sha256.hex() for each in files} == wanted:
                    return {name: content}
    except (ShoalError, TimeoutError):
        return None
    return {}


async def _manifest(
    name: str, answers: "asyncio.Queue[ModelMessage | ShoalError]"
) -> Manifest | None:
    """Wait for a peer's answer.  Raises ShoalError; TimeoutError if it is silent."""
    while True:
        async with asyncio.timeout(ANSWER_TIMEOUT):
            answer = await answers.get()
        match answer:
            case ManifestAnswer(model=model, manifest=data) if model == name:
                return manifest.decode(data) if data else None
            case HashingModel() | ManifestAnswer():
                continue
            case ShoalError():
                raise answer
            case _:
                raise PeerError("it answers what was not asked")
