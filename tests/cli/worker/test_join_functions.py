"""Offers of functions, and the coordinator that gets them."""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from cli.coordinators import ORIGINAL, Sites
from cli.worker.test_join_models import worker
from harness.ports import free_port
from live.programs import GatedModel
from shoal.app.fleet_files import save_fleet
from shoal.cli.worker import join_functions, join_target
from shoal.cli.worker.join_functions import (
    check_task_options,
    cluster_caller,
    cluster_engines,
    function_membership,
    resolve_call_target,
    start_functions,
)
from shoal.cli.worker.join_target import resolve_direct
from shoal.config import JoinConfig
from shoal.domain.errors import ConfigError
from shoal.engines.local_servers import ServerLocation
from shoal.protocols import discover
from shoal.tasks.process_pool import ProcessPool
from shoal.worker.agent import WorkerEvent
from shoal.worker.blob_cache import BlobCache
from shoal.worker.calls import FunctionBackend


@pytest.mark.parametrize(
    ("trust_code", "token", "warned"),
    [(True, "", True), (True, "secret", False), (False, "", False)],
)
async def test_join_reports_that_code_is_not_run_without_a_token(
    *, trust_code: bool, token: str, warned: bool
) -> None:
    events: list[WorkerEvent] = []

    def on_event(name: str, about: Mapping[str, object], event: WorkerEvent) -> None:
        events.append(event)

    joins = worker([], joint=True)
    joins = replace(joins, target=replace(joins.target, token=token), on_event=on_event)
    caller = ProcessPool([], 1, trust_code=trust_code)
    blobs = BlobCache()
    agent = function_membership(joins, FunctionBackend(caller, blobs))

    agent._on_joined()
    await blobs.close()

    assert [each.kind for each in events] == ["joined"]
    assert ("no effect without --token" in events[0].reason) is warned


async def test_folders_of_killed_workers_are_deleted_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    def make() -> BlobCache:
        threads.append(threading.current_thread())
        return BlobCache()

    monkeypatch.setattr(join_functions, "BlobCache", make)
    config = JoinConfig(tasks=("no_such_module",), slots=1)

    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match="no_such_module"):
            await start_functions(config, worker([], joint=True).target, stack)

    (thread,) = threads
    assert thread is not threading.current_thread()


PORTS = {"direct": {"macfleet": {"transport": 50052, "heartbeat": 50051}}}
HEALTH = {"status": "ok", "shoal": "0.2", **PORTS}


@pytest.mark.parametrize("token", ["", "a-long-token"])
@pytest.mark.parametrize(("suffix", "scheme"), [("", "tls-any"), (":tcp", "tcp")])
async def test_shoal_coordinator_is_joined_at_its_function_port(
    sites: Sites, tmp_path: Path, token: str, suffix: str, scheme: str
) -> None:
    labels = {f"transport{suffix}": 50052, f"heartbeat{suffix}": 50051}
    ports = {"direct": {"macfleet": labels}}
    url = await sites({"/healthz": {**HEALTH, **ports}})

    target = await resolve_call_target(url, "macfleet", token, tmp_path)

    assert (target.url, target.token) == (url, token)
    assert target.protocol.name == "macfleet"
    assert target.direct == f"{scheme}://127.0.0.1:50052?heartbeat=50051"


async def test_unreachable_coordinator_is_queried_later(
    sites: Sites, tmp_path: Path
) -> None:
    target = await resolve_call_target("http://127.0.0.1:1", "macfleet", "", tmp_path)

    assert target.protocol.name == "macfleet"
    assert target.direct == "tcp://127.0.0.1:4010"


async def test_named_wire_joins_any_peer(tmp_path: Path) -> None:
    target = await resolve_call_target(
        "192.0.2.7:50051", "macfleet", "secret", tmp_path
    )

    assert (target.url, target.token) == ("192.0.2.7:50051", "secret")
    assert target.direct == ""


@pytest.mark.parametrize(
    ("url", "name", "dialled", "token"),
    [
        ("192.0.2.7:1", "", "192.0.2.7:1", "kept token"),
        ("192.0.2.7:1", "lab 7", "192.0.2.7:1?fleet=lab+7", "kept token"),
        ("tls-any://h:1?fleet=lab", "lab", "tls-any://h:1?fleet=lab", "kept token"),
        ("192.0.2.7:1?fleet=other", "lab", "192.0.2.7:1?fleet=other", ""),
        ("tcp://192.0.2.7:1", "lab", "tcp://192.0.2.7:1", ""),
    ],
)
async def test_peer_is_joined_with_the_paired_fleet(
    tmp_path: Path, url: str, name: str, dialled: str, token: str
) -> None:
    fleets = discover()["macfleet"].fleets
    assert fleets is not None
    save_fleet(tmp_path, fleets, "kept token", name)

    target = await resolve_call_target(url, "macfleet", "", tmp_path)
    assert (target.url, target.token) == (dialled, token)

    given = await resolve_call_target(url, "macfleet", "another token", tmp_path)
    assert (given.url, given.token) == (url, "another token")


async def test_error_for_a_peer_without_a_wire_names_the_wires(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="or a peer with --wire macfleet"):
        await resolve_call_target("tcp://192.0.2.7:4011", "auto", "", tmp_path)


async def test_coordinator_without_a_function_port_is_an_error(
    sites: Sites, tmp_path: Path
) -> None:
    url = await sites({"/healthz": {**HEALTH, "direct": {}}})

    with pytest.raises(ConfigError, match="has no port for functions"):
        await resolve_call_target(url, "macfleet", "", tmp_path)


@pytest.mark.parametrize("wire", ["auto", "dispatch"])
async def test_other_coordinators_get_tasks_where_the_wire_has_them(
    sites: Sites, tmp_path: Path, wire: str
) -> None:
    url = await sites({"/v1/health": ORIGINAL})

    target = await resolve_call_target(url, wire, "", tmp_path)

    assert (target.url, target.protocol.name, target.direct) == (url, "dispatch", "")


async def test_unknown_coordinator_gets_tasks_on_the_wire_that_is_named(
    sites: Sites, tmp_path: Path
) -> None:
    url = await sites({"/": {}})

    target = await resolve_call_target(url, "dispatch", "", tmp_path)
    down = await resolve_call_target("http://127.0.0.1:1", "dispatch", "", tmp_path)

    assert target.protocol.name == down.protocol.name == "dispatch"
    with pytest.raises(ConfigError, match="not a coordinator that Shoal recognises"):
        await resolve_call_target(url, "auto", "", tmp_path)


async def test_shoal_coordinator_calls_functions_whatever_the_wire_of_models(
    sites: Sites, tmp_path: Path
) -> None:
    url = await sites({"/healthz": HEALTH})

    target = await resolve_call_target(url, "dispatch", "", tmp_path)

    assert target.protocol.name == "shoal"


async def test_code_cannot_be_offered_where_only_tasks_are_given_out(
    sites: Sites, tmp_path: Path
) -> None:
    url = await sites({"/v1/health": ORIGINAL})
    target = await resolve_call_target(url, "auto", "", tmp_path)

    with pytest.raises(ConfigError, match="sends no code; offer tasks with --tasks"):
        check_task_options(JoinConfig(trust_code=True), target, models=False)
    for cluster in ("ray", "dask"):
        joined = JoinConfig(tasks=("mine",), engine=(cluster,))
        with pytest.raises(ConfigError, match="one connection for both tasks and mod"):
            check_task_options(joined, target, models=True)
        check_task_options(joined, target, models=False)


async def test_functions_are_offered_to_a_discovered_coordinator(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await sites({"/healthz": HEALTH})

    async def nearby(kind: str, *, secure: bool, local_error: str) -> str:
        return found

    monkeypatch.setattr(join_target, "find_lan_coordinator", nearby)
    monkeypatch.setattr(join_target, "local_url", lambda folder: "http://127.0.0.1:1")

    target = await resolve_call_target("", "auto", "", tmp_path)

    assert (target.url, target.protocol.name) == (found, "shoal")


async def test_changed_port_is_looked_up(sites: Sites, tmp_path: Path) -> None:
    url = await sites({"/healthz": HEALTH})
    target = await resolve_call_target(url, "macfleet", "", tmp_path)

    direct = "tls-any://127.0.0.1:50052?heartbeat=50051"
    assert await resolve_direct(target) == direct


@pytest.fixture
def closed_port() -> ServerLocation:
    """A closed port."""
    return ServerLocation(free_port(), "Ray Serve")


@pytest.fixture
def serve() -> Iterator[ServerLocation]:
    model = GatedModel(pause=0)
    yield ServerLocation(model.port, "Ray Serve")
    model.close()


async def test_ray_serve_is_an_engine_if_it_has_models(serve: ServerLocation) -> None:
    engines = await cluster_engines(("ray",), tasks=False, serve=serve)

    assert engines == (f"http://127.0.0.1:{serve.port}/v1",)


async def test_named_server_replaces_ray_serve(serve: ServerLocation) -> None:
    named = ("ray", "http://serve.example:8000/v1", "embedded")

    assert await cluster_engines(named, tasks=False, serve=serve) == named[1:]


async def test_without_models_only_tasks_are_offered(
    closed_port: ServerLocation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await cluster_engines(("ray",), tasks=True, serve=closed_port) == ()
    assert "offering tasks only" in capsys.readouterr().err


async def test_without_models_and_tasks_the_error_has_a_remedy(
    closed_port: ServerLocation,
) -> None:
    with pytest.raises(ConfigError, match="--tasks MODULE"):
        await cluster_engines(("ray",), tasks=False, serve=closed_port)


async def test_dask_runs_functions_only() -> None:
    assert await cluster_engines(("dask", "embedded"), tasks=True) == ("embedded",)
    with pytest.raises(ConfigError, match="add --tasks MODULE"):
        await cluster_engines(("dask",), tasks=False)
    with pytest.raises(ConfigError, match="a worker of its own"):
        await cluster_engines(("dask", "ray"), tasks=True)


def test_missing_dask_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [])  # where it would be found
    monkeypatch.delitem(sys.modules, "distributed", raising=False)

    with pytest.raises(
        ConfigError, match=r"Dask is not installed: .*install .*\[dask\]"
    ):
        cluster_caller(JoinConfig(tasks=("mine",), engine=("dask",)))
