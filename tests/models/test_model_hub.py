"""Downloads from a hub into its cache; as a command: tests/cli/test_models_pull."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from models.hub_server import HubServer, serving
from shoal.domain.errors import ConfigError, Unavailable
from shoal.models.model_hub import ModelHub

REPOSITORY = "org/Tiny-GGUF"
FILES = {"tiny-Q8_0.gguf": b"GGUF"}


@pytest.fixture
async def hub() -> AsyncIterator[HubServer]:
    async with serving(HubServer({REPOSITORY: FILES})) as running:
        yield running


def download(url: str) -> Path:
    """Download the only model of the repository."""
    hub = ModelHub(url)
    (model,) = hub.models(REPOSITORY)
    return hub.download(REPOSITORY, model, lambda size: None)


async def test_folder_that_cannot_be_written_is_named(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(file / "hub"))

    with pytest.raises(ConfigError) as refusal:
        await asyncio.to_thread(download, hub.url)

    assert "Not a directory" in str(refusal.value)
    assert "choose another folder: HF_HOME=FOLDER" in str(refusal.value)


async def test_model_larger_than_the_disk_is_not_begun(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.claimed_size = 10**16
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ConfigError, match=r"model has 10000000\.0 GB; make room"):
        await asyncio.to_thread(download, hub.url)

    assert os.listdir(tmp_path) == []


def test_unreachable_hub_is_reported_without_retries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(Unavailable, match="cannot reach http://127"):
        ModelHub("http://127.0.0.1:1").suggest("tiny")

    assert not caplog.records


def test_name_that_no_repository_can_have_is_the_reported_reason() -> None:
    with pytest.raises(ConfigError, match="org/a--b is no repository's name"):
        ModelHub("http://127.0.0.1:1").models("org/a--b")


async def test_hub_that_leads_in_a_circle_is_unavailable() -> None:
    async def here(request: web.BaseRequest) -> web.Response:
        raise web.HTTPFound(request.path)

    async with RawTestServer(here) as server:
        hub = ModelHub(str(server.make_url("")))
        with pytest.raises(Unavailable, match="cannot reach http://127"):
            await asyncio.to_thread(hub.read, REPOSITORY, "", "tiny.gguf", 0, 4)


async def test_page_in_place_of_the_hub_is_reported() -> None:
    async def page(request: web.BaseRequest) -> web.Response:
        return web.Response(text="<html>Sign in</html>", content_type="text/html")

    async with RawTestServer(page) as server:
        hub = ModelHub(str(server.make_url("")))
        for ask in (hub.models, hub.suggest):
            with pytest.raises(Unavailable, match="a sign-in page may be in between"):
                await asyncio.to_thread(ask, REPOSITORY)
