"""Models are copied from coordinators by their URL, and from other peers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from cli.coordinators import ORIGINAL, Sites
from shoal.app.server import RunningCoordinator, run_coordinator
from shoal.cli.use.models import CopySource
from shoal.config import ServeConfig
from shoal.domain.credentials import with_fingerprint, without_fingerprint
from shoal.domain.errors import ConfigError, Unavailable
from shoal.models.download import DownloadedModel
from shoal.models.fetch import fetch_model

TOKEN = "9f2c71d4e8a6b03597c1d5e2"
WEIGHTS = bytes(3_000_000)


@pytest.fixture
def config(tmp_path: Path) -> ServeConfig:
    """The settings of a coordinator that shares a model."""
    model = tmp_path / "theirs"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights.bin").write_bytes(WEIGHTS)
    return ServeConfig(
        port=0,
        data_dir=tmp_path / "data",
        join_token=TOKEN,
        drain=0.0,
        no_discovery=True,
        share=(f"org/name={model}",),
    )


@pytest.fixture
async def coordinator(config: ServeConfig) -> AsyncIterator[RunningCoordinator]:
    async with run_coordinator(config) as running:
        yield running


async def copied(
    where: str, token: str, folder: Path, progress: list[int] | None = None
) -> DownloadedModel:
    def on_progress(done: int, size: int | None) -> None:
        if progress is not None:
            progress.append(done)

    source = CopySource(where, "", token, plain=False)
    source.check()
    return await fetch_model(
        "org/name", [source.peer], folder, replace=True, progress=on_progress
    )


async def test_model_is_copied_from_a_coordinator(
    coordinator: RunningCoordinator, tmp_path: Path
) -> None:
    host = f"127.0.0.1:{coordinator.port}"
    for where in (f"http://{host}", f"http://{host}/v1/", host):
        done: list[int] = []

        model = await copied(where, TOKEN, tmp_path / "ours", done)

        assert (model.path / "weights.bin").read_bytes() == WEIGHTS, where
        assert done[-1] == model.size


async def test_several_copy_at_the_same_time(
    coordinator: RunningCoordinator, tmp_path: Path
) -> None:
    copies = [copied(coordinator.url, TOKEN, tmp_path / name) for name in "ab"]

    for model in await asyncio.gather(*copies):
        assert (model.path / "weights.bin").read_bytes() == WEIGHTS


async def test_token_with_a_fingerprint_is_enough_for_a_certificate_of_ones_own(
    config: ServeConfig, tmp_path: Path
) -> None:
    async with run_coordinator(replace(config, tls="auto")) as running:
        _, fingerprint = without_fingerprint(running.pinned_key)
        assert fingerprint is not None
        token = with_fingerprint(TOKEN, fingerprint)
        host = f"127.0.0.1:{running.port}"
        for where in (f"https://{host}", host):
            model = await copied(where, token, tmp_path / "ours")

            assert (model.path / "weights.bin").read_bytes() == WEIGHTS, where

        with pytest.raises(Unavailable, match="URL begins with https"):
            await copied(f"http://{host}", token, tmp_path)
        with pytest.raises(Unavailable, match="certificate"):
            await copied(f"https://{host}", TOKEN, tmp_path)


async def test_refused_token_is_the_reported_reason(
    coordinator: RunningCoordinator, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable, match="Invalid token"):
        await copied(coordinator.url, "another", tmp_path)


async def test_other_servers_are_not_coordinators(sites: Sites, tmp_path: Path) -> None:
    url = await sites({"/healthz": ORIGINAL})

    with pytest.raises(Unavailable, match="HTTP 404: another program answers"):
        await copied(url, TOKEN, tmp_path)
    with pytest.raises(Unavailable, match="connection refused"):
        await copied("http://127.0.0.1:1", TOKEN, tmp_path)
    with pytest.raises(Unavailable, match="a Mac, needs --plain"):
        await copied("127.0.0.1:1", TOKEN, tmp_path)
    with pytest.raises(ConfigError, match="give --plain"):
        await copied("tcp://127.0.0.1:1", TOKEN, tmp_path)
