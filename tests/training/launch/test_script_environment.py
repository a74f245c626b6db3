"""The environment of scripts, and how their machines reach each other."""

import socket

import pytest

from shoal.training.launch.script import (
    Coordinator,
    NodePlace,
    free_port,
    reachable_host,
    run_variables,
    torchrun_variables,
    worker_variables,
)
from shoal.training.run_events import run_id_of
from shoal.transports.blocking.rank_socket import address_towards

COORDINATOR = Coordinator("http://192.0.2.1:4010", "")


def test_ranks_are_counted_as_torchrun_does() -> None:
    place = NodePlace(2, 3, 4)

    variables = torchrun_variables(place, 1, ("192.0.2.7", 29500), "r", 1)

    assert place.size == 12
    assert {**variables, "PYTHON_EXEC": "python"} == {
        "LOCAL_RANK": "1",
        "RANK": "9",
        "GROUP_RANK": "2",
        "ROLE_RANK": "9",
        "ROLE_NAME": "default",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "12",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_WORLD_SIZE": "12",
        "MASTER_ADDR": "192.0.2.7",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "1",
        "TORCHELASTIC_RUN_ID": "r",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "PYTHON_EXEC": "python",
    }


def test_variables_of_the_rendezvous_are_for_the_backend_shoal() -> None:
    token = "t" * 64

    ours = run_variables(token, "shoal", COORDINATOR, output=True)
    gloo = run_variables(token, "gloo", COORDINATOR, output=True)

    assert ours == {
        "SHOAL_RUN": run_id_of(token),
        "SHOAL_RUN_BACKEND": "shoal",
        "SHOAL_RUN_TOKEN": token,
        "SHOAL_RUN_URL": "http://192.0.2.1:4010",
        "SHOAL_RUN_FINGERPRINT": "",
        "SHOAL_RUN_OUTPUT": "1",
    }
    assert gloo == {"SHOAL_RUN": run_id_of(token), "SHOAL_RUN_BACKEND": "gloo"}


@pytest.mark.parametrize(
    ("published", "own", "reached"),
    [
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),  # all on one machine
        ("127.0.0.1", "192.0.2.9", "192.0.2.1"),  # it is on the coordinator's
        ("192.0.2.5", "192.0.2.9", "192.0.2.5"),
        ("192.0.2.5", "127.0.0.1", "192.0.2.5"),
    ],
)
def test_machine_of_the_coordinator_is_reached_where_that_is(
    published: str, own: str, reached: str
) -> None:
    assert reachable_host(published, own, COORDINATOR) == reached


def test_first_of_several_urls_says_where_the_coordinator_is() -> None:
    several = Coordinator("https://one,https://two:4010", "")

    assert (several.host, several.port) == ("one", 443)


def test_own_address_is_that_on_the_way_to_the_coordinator() -> None:
    assert address_towards("127.0.0.1", 4010) == "127.0.0.1"
    local = Coordinator("https://localhost", "")
    assert address_towards(local.host, local.port) in ("127.0.0.1", "::1")


def test_chosen_port_is_free_and_given_to_nobody_who_asks_for_any() -> None:
    run_id = run_id_of("5d" * 32)
    port = free_port(run_id)
    with (
        socket.create_server(("127.0.0.1", port)),
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        assert port < 30_000 < other.getsockname()[1]
        assert free_port(run_id) != port


def test_processes_share_the_cores_of_a_whole_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "77")

    part, alone = worker_variables(False, 1), worker_variables(True, 1)
    many = worker_variables(True, 10_000)

    assert part["OMP_NUM_THREADS"] == "77"
    assert 1 <= int(alone["OMP_NUM_THREADS"]) < 77
    assert many["OMP_NUM_THREADS"] == "1"
    for each in (part, alone, many):
        assert not each.keys() & {"MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
