"""Which models a worker with a Ray cluster offers."""

import socket
from collections.abc import Iterator

import pytest

from live.programs import GatedModel
from shoal.cli.on_ray import engines_of_ray
from shoal.domain.errors import ConfigError
from shoal.engines.local import Place


@pytest.fixture
def nobody() -> Place:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    return Place(port, "Ray Serve")


@pytest.fixture
def serve() -> Iterator[Place]:
    model = GatedModel(pause=0)
    yield Place(model.port, "Ray Serve")
    model.close()


async def test_ray_serve_is_an_engine_if_it_has_models(serve: Place) -> None:
    engines = await engines_of_ray(("ray",), tasks=False, serve=serve)

    assert engines == (f"http://127.0.0.1:{serve.port}/v1",)


async def test_server_that_is_named_stands_for_it(serve: Place) -> None:
    named = ("ray", "http://serve.example:8000/v1", "embedded")

    assert await engines_of_ray(named, tasks=False, serve=serve) == named[1:]


async def test_without_models_there_are_tasks_only(
    nobody: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await engines_of_ray(("ray",), tasks=True, serve=nobody) == ()
    assert "tasks only" in capsys.readouterr().err


async def test_without_anything_it_says_what_to_give(nobody: Place) -> None:
    with pytest.raises(ConfigError, match="--tasks MODULE"):
        await engines_of_ray(("ray",), tasks=False, serve=nobody)
