"""Gets a model of the hub with machines of the pool: these have its very files, or get
parts of it from the hub at the same time.

The hub says which files these are, by their SHA-256: names of models are only a guess
where they may be.
"""

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

from shoal.domain.errors import PeerError, ShoalError
from shoal.domain.model_messages import (
    HashingModel,
    ManifestAnswer,
    ManifestRequest,
    ModelMessage,
)
from shoal.models import manifest
from shoal.models.fetch import ModelPeer, OnProgress, fetch_model
from shoal.models.file_hashes import FileHashes
from shoal.models.hub_source import HubSource
from shoal.models.manifest import Manifest
from shoal.models.names import GgufModel
from shoal.models.partial_server import OpenPort

ANSWER_TIMEOUT = 20.0  # seconds without an answer, or a word that hashing goes on


async def fetch_from_pool(
    model: GgufModel,
    names: Collection[str],
    peers: Sequence[ModelPeer],
    folder: Path,
    progress: OnProgress,
    *,
    open_port: OpenPort | None = None,
) -> dict[str, Path] | None:
    """Fetch the files of a model into a folder; return them by their SHA-256.

    The ``peers`` are asked for models of these ``names``.  None: no peer has exactly
    these files.  What has arrived of a fetch that fails stays in the folder.

    Raises ShoalError.
    """
    wanted = {each.sha256 for each in model.files}
    if not peers or "" in wanted:
        return None
    asked = [_find(peer, names, wanted) for peer in peers]
    answers = await asyncio.gather(*asked)
    found = next(filter(None, answers), None)
    if found is None:
        return None
    name, content = found
    having = [peer for peer, each in zip(peers, answers, strict=True) if each == found]
    fetched = await fetch_model(
        *(name, having, folder),
        address=content.address,
        replace=True,
        progress=progress,
        hashes=FileHashes(),
        open_port=open_port,
    )
    return {each.sha256.hex(): fetched.path / each.name for each in content.files}


async def fetch_together(
    source: HubSource,
    name: str,
    peers: Sequence[ModelPeer],
    folder: Path,
    progress: OnProgress,
    *,
    open_port: OpenPort | None = None,
) -> dict[str, Path]:
    """Fetch the files of a model from the hub; return them by their SHA-256.

    Machines that the ``peers`` know, and that fetch the model as well, swap parts with
    this one.  Otherwise as ``fetch_from_pool``.

    Raises ShoalError; PeerError if the files are not the hub's.
    """
    content = source.manifest
    fetched = await fetch_model(
        *(name, [source], folder),
        replace=True,
        progress=progress,
        open_port=open_port,
        introducers=peers,
    )
    return {each.sha256.hex(): fetched.path / each.name for each in content.files}


async def _find(
    peer: ModelPeer, names: Collection[str], wanted: Collection[str]
) -> tuple[str, Manifest] | None:
    """Return the name and the manifest of the wanted files at a peer, if it has them.

    One that cannot be asked has none.
    """
    answers: asyncio.Queue[ModelMessage | ShoalError] = asyncio.Queue()
    try:
        async with peer.connect() as connection:
            if not connection.sends_chunks:
                return None
            connection.receive = connection.on_lost = answers.put_nowait
            for name in names:
                connection.send(ManifestRequest(name))
                content = await _manifest(name, answers)
                files = () if content is None else content.files
                if content and {each.sha256.hex() for each in files} == wanted:
                    return name, content
    except (ShoalError, TimeoutError):
        pass
    return None


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
