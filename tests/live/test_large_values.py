"""Values of nearly the largest size, both ways, while chats use the same connection."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

import shoal
from live.programs import KEY, PATIENCE, TESTS, GatedModel, Program, Programs
from models.tiny_answers import ANSWERS

SIZE = 255 << 20  # bytes: below the limit with what encodes it
# Bytes: a value each way, with its copies for hashes, disk and calls, which are six or
# seven at once, and what the allocator keeps.
PEAK_MAX = 12 * SIZE


def size_of(value: Any) -> int:
    return len(value)


def peak(program: Program) -> int:
    """Return the largest size that a process has had in memory, in bytes."""
    status = Path(f"/proc/{program.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_chats_go_on_while_the_largest_values_pass_both_ways(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    question, answer = next(iter(ANSWERS.items()))
    model = GatedModel(pause=len(answer) + 1)
    try:
        coordinator = programs.serve()
        flags = (*model.flags, "--trust-code", "--tasks", "tasks.demo_tasks")
        worker = coordinator.joined("one", *flags, "--slots", "2")
        chats = 0
        with shoal.Pool(coordinator.url, KEY) as pool, coordinator.client() as client:
            there = pool.submit(size_of, pool.put(bytes(SIZE)))
            back = pool.submit(bytes, SIZE)
            while not (there.done() and back.done()):
                got = client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": question}]
                )
                assert got.choices[0].message.content == "".join(answer)
                chats += 1

            assert there.result(PATIENCE) == SIZE
            assert back.result(PATIENCE) == bytes(SIZE)

        assert chats > 0
        assert peak(coordinator.program) < PEAK_MAX
        assert peak(worker) < PEAK_MAX
    finally:
        model.close()
