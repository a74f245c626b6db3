"""A model that fits on no machine of a pool, run by llama.cpp on several."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.llama_cpp import llama_cpp
from harness.wide_model import LARGE_TENSORS, LAYERS, TENSOR_SIZE, write_wide_model
from live.machines import Machine, two_networks
from live.programs import (
    PATIENCE,
    TOKEN,
    Pool,
    Program,
    Programs,
    demonstrate,
    eventually,
    text_in,
)
from shoal.engines.gguf_files import demo_model_path

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="Debian's programs"),
]

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo_giant.py"
MODEL = "giant"
QUESTION = "Tell a long story about a fish that goes to the moon."
TOKENS = 60
MEMORY = "90MB"  # of each machine: the model needs more than 100


class Machines:
    """A pool of a machine that has the model's file, and others that lend memory."""

    def __init__(self, programs: Programs, pool: Pool) -> None:
        self._programs = programs
        self.pool = pool
        self.runner = self.join("runner", memory="0.09")

    def join(self, name: str, *flags: str, memory: str = "0.09") -> Program:
        data = self._programs.folder / name
        (data / "models").mkdir(parents=True)
        if not flags:
            shutil.copy(demo_model_path(), data / "models" / f"{MODEL}.gguf")
        return self.pool.joined(
            *(name, "--load", "local", "--data-dir", os.path.relpath(data)),
            *("--memory", memory),
            *("--context", "512", "--slots", "1", "--llama-cpp", str(llama_cpp())),
            *flags,
        )

    def lend(self, name: str, *flags: str) -> Program:
        return self.join(name, "--lend-memory", MEMORY, *flags)

    def parts(self) -> Sequence[str]:
        """Return the machines that run the model together."""
        listed: list[dict[str, Any]] = self.pool.admin("models")["data"]
        return [
            part["name"]
            for each in listed
            for replica in each["replicas"]
            if each["id"] == MODEL and replica["state"] == "loaded"
            for part in replica["parts"]
        ]

    def shared(self, name: str) -> str:
        """Return what the status says of a machine's part in large models."""
        peers = self.pool.admin("status")["peers"]
        return str(next(each["shared"] for each in peers if each["name"] == name))

    def answer(self) -> Iterator[str]:
        with (
            self.pool.client() as client,
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": QUESTION}],
                max_tokens=TOKENS,
                temperature=0,
                stream=True,
            ) as stream,
        ):
            yield from text_in(stream)


@pytest.fixture
def machines(programs: Programs) -> Machines:
    return Machines(programs, programs.serve())


def machines_file(programs: Programs) -> Path:
    return programs.folder / "runner" / "models" / f"{MODEL}.gguf"


def shard_of(worker: Program) -> psutil.Process:
    """Return the process of llama.cpp that holds a part on a worker's machine."""
    below = psutil.Process(worker.process.pid).children(recursive=True)
    found = [each for each in below if "rpc-server" in " ".join(each.cmdline())]
    return found[-1]


def test_the_demonstration() -> None:
    lines = [line for _, line in demonstrate(SCRIPT, str(llama_cpp()))]

    assert "its layers: 17 on beaver and 13 on otter" in lines
    assert "⟨beaver was killed, and its part of the model⟩" in lines
    assert "its layers: 17 on heron and 13 on otter" in lines


def test_whatever_happens_to_a_part_the_text_is_the_same(machines: Machines) -> None:
    """Its process stops without a word, or its machine is killed."""
    anna = machines.lend("anna")
    whole = "".join(machines.answer())
    assert machines.parts() == ["anna", "runner"]
    assert whole
    assert machines.shared("runner").startswith("runs giant with anna (17 layers)")
    assert machines.shared("anna") == "lends 90 MB: 47 MB to giant on runner"

    with machines.pool.client() as client:
        jobs = machines.pool.admin("jobs")["data"]
        (job,) = [each for each in jobs if each["kind"] == "chat"]
        receipt = client.get(f"/receipts/{job['id']}", cast_to=object)
    assert '"shards":["shoal:anna","shoal:runner"]' in str(receipt)

    answer, stopped = machines.answer(), shard_of(anna)
    begun = [*islice(answer, 5)]
    stopped.send_signal(signal.SIGSTOP)
    assert "".join([*begun, *answer]) == whole
    eventually(lambda: not stopped.is_running(), "its end")
    assert machines.parts() == ["anna", "runner"]  # by another process

    machines.lend("ben")
    answer = machines.answer()
    begun = [*islice(answer, 5)]
    anna.kill()
    assert "".join([*begun, *answer]) == whole
    assert machines.parts() == ["ben", "runner"]


def test_layers_are_copied_from_any_machine_that_has_them(programs: Programs) -> None:
    """A machine that could not run the model has its file, too."""
    pool = programs.serve()
    write_wide_model(programs.folder / f"{MODEL}.gguf")

    def join(name: str, *flags: str, has_file: bool = True) -> Program:
        models = programs.folder / name / "models"
        models.mkdir(parents=True)
        if has_file:
            os.link(programs.folder / f"{MODEL}.gguf", models / f"{MODEL}.gguf")
        return pool.joined(
            *(name, "--load", "local", "--data-dir", str(models.parent)),
            *("--memory", "0.1", "--slots", "1", "--context", "256", *flags),
        )

    join("ben")
    join(
        *("anna", "--lend-memory", "150MB", "--llama-cpp", str(llama_cpp())),
        has_file=False,
    )
    join("runner", "--llama-cpp", str(llama_cpp()))
    with pool.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=3,
            temperature=0,
        )

    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    (folder,) = (programs.folder / "anna" / "shards").iterdir()
    copied = [each.stat().st_size for each in (folder / "copied" / "rpc").iterdir()]
    layers = len(copied) // LARGE_TENSORS
    assert 0 < layers < LAYERS
    assert copied == [TENSOR_SIZE] * LARGE_TENSORS * layers
    assert not [each for each in folder.rglob("own/**/*") if each.is_file()]


def test_machines_without_a_way_to_each_other_use_the_coordinator(
    tmp_path: Path,
) -> None:
    """Each of their networks has a cable to the coordinator's machine only."""
    with two_networks() as (near, middle, far), ExitStack() as ending:
        programs = Programs(tmp_path)
        ending.callback(programs.close)
        with middle.inside():
            served = programs.serve("--host", "0.0.0.0")

        def reached_from(machine: Machine) -> Pool:
            url = f"http://{machine.peer_address}:{served.port}"
            return Pool(programs, served.program, {**served.ready, "url": url})

        with near.inside():
            machines = Machines(programs, reached_from(near))
            anna = machines.lend("anna")
            whole = "".join(machines.answer())
            assert machines.parts() == ["anna", "runner"]
            anna.kill()
        with far.inside():
            machines.pool = reached_from(far)
            ben = machines.lend("ben")
        with near.inside():
            machines.pool = reached_from(near)
            assert "".join(machines.answer()) == whole
            assert machines.parts() == ["ben", "runner"]
            assert shard_of(ben).is_running()

            machines.lend("carl")
            answer = machines.answer()
            begun = [*islice(answer, 5)]
            far.ip("link", "set", far.cable, "down")
            assert "".join([*begun, *answer]) == whole
            assert machines.parts() == ["carl", "runner"]


def test_parts_stay_while_the_coordinator_is_away(
    machines: Machines, programs: Programs
) -> None:
    anna = machines.lend("anna")
    whole = "".join(machines.answer())
    shard = shard_of(anna)

    machines.pool.program.kill()
    machines.pool = programs.serve(port=machines.pool.port)
    eventually(lambda: machines.parts() == ["anna", "runner"], "their return")

    assert "".join(machines.answer()) == whole
    assert shard.is_running()

    machines.runner.kill()
    eventually(lambda: machines.shared("anna") == "lends 90 MB", "the part is freed")
    assert not shard.is_running()


def test_owner_lends_to_the_machines_that_it_names(machines: Machines) -> None:
    machines.lend("anna", "--lend-for", "00" * 32)

    plan = machines.pool.admin(f"splits/{MODEL}")

    assert plan["needed"]
    assert plan["parts"] == []
    assert plan["why"].endswith("none lends")


def test_owner_who_pauses_the_machine_has_its_memory_back(
    machines: Machines, programs: Programs
) -> None:
    anna = machines.lend("anna")
    whole = "".join(machines.answer())
    shard = shard_of(anna)
    machines.lend("ben")

    data = ("--data-dir", str(programs.folder / "anna"))
    assert programs.run("throttle", "0", *data).wait() == 0

    eventually(lambda: not shard.is_running(), "the part is freed")
    assert "".join(machines.answer()) == whole
    assert machines.parts() == ["ben", "runner"]


def test_run_splits_a_file_that_is_too_large(
    machines: Machines, programs: Programs, tmp_path: Path
) -> None:
    machines.lend("anna")
    file = tmp_path / "big.gguf"
    file.hardlink_to(machines_file(programs))
    environment = {
        **os.environ,
        "SHOAL_DATA_DIR": str(programs.data),
        "SHOAL_MEMORY": "0.09",
        "SHOAL_CONTEXT": "512",
        "SHOAL_SLOTS": "1",
        "SHOAL_NAME": "here",
        "SHOAL_TOKEN": TOKEN,
        "SHOAL_LLAMA_CPP": str(llama_cpp()),
    }

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "shoal", "run", f"big={file}", *arguments]
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE,
            check=False,
        )

    explained = run("--explain")
    assert explained.returncode == 0, explained.stderr
    assert "split over anna (46.7 MB), here (79.0 MB)" in explained.stdout
    assert "anna: 17 layers" in explained.stdout

    answered = run("--on", "anna", "Name a fish.")
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.strip()
    assert "anna: 17 layers, 46.7 MB" in answered.stderr
    assert machines.pool.admin("deployments")["data"] == []
