"""``shoal.launch``: what it refuses before anything is sent, and what ends a run."""

import socket
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import pytest

import shoal
from shoal.client.connection import JsonRequest
from shoal.client.coordinator import find_coordinator
from shoal.client.threaded_calls import ThreadedCalls
from shoal.client.training_run import RunFailed, TrainingRun
from shoal.domain.errors import InvalidRequest
from shoal.training.launch.member import LeftOut, ScriptFailed

LEFT = LeftOut("the run goes on without this machine")
FAILED = ScriptFailed("rank 1 was ended by SIGKILL")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"nodes": 0}, "nodes=0: expected 1 to 256"),
        ({"nodes": 2, "min_nodes": 3}, "min_nodes=3: expected 1 to 2"),
        ({"nodes": 2, "min_nodes": 0}, "min_nodes=0: expected 1 to 2"),
        ({"nodes": 1, "processes": 65}, "processes=65: expected 1 to 64"),
        ({"nodes": 1, "backend": "mpi"}, "backend=mpi: expected one of shoal, gloo"),
    ],
)
def test_invalid_arguments_are_named(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        shoal.launch("train.py", **arguments)


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        ([FAILED, ScriptFailed("rank 0 is alone")], FAILED),
        ([CancelledError("1 of 2 members left"), FAILED], FAILED),
        ([LEFT, FAILED], FAILED),
        ([LEFT, CancelledError("cancelled")], LEFT),
    ],
)
def test_run_fails_with_the_first_error_from_which_others_follow(
    errors: list[Exception], cause: Exception
) -> None:
    members: Any = [Future() for _ in errors]
    run = TrainingRun(None, None, "token", members, 1)  # type: ignore[arg-type]  # unused
    for member, error in zip(members, errors, strict=True):
        member.set_exception(error)

    with pytest.raises(RunFailed, match=str(cause)) as failed:
        run.result()
    assert failed.value.__cause__ is cause


def test_what_leaves_waits_for_no_coordinator() -> None:
    """The thread has ended then: it must not outlive the interpreter."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        ThreadPoolExecutor() as threads,
    ):
        address = find_coordinator(f"http://127.0.0.1:{silent.getsockname()[1]}", "key")
        carrier = ThreadedCalls(address)
        asking = threads.submit(carrier.request, JsonRequest("/", object))
        with silent.accept()[0] as asked:
            assert asked.recv(1)

            carrier.leave()

            with pytest.raises(CancelledError):
                asking.result()
    assert not [each for each in threading.enumerate() if each.name == "shoal-pool"]
