"""Memory and threads for a model."""

from pathlib import Path

import pytest

from shoal.engines.resources import (
    free_memory,
    free_memory_of_gpus,
    processors,
    threads_for,
    use_gpus,
)

MEMINFO = "MemTotal:       24000000 kB\nMemAvailable:   1000000 kB\n"


def test_linux_reports_available_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)

    assert free_memory(tmp_path / "meminfo", tmp_path) == 1000000 * 1024


def test_container_limit_bounds_free_memory(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 100\nshmem 100\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 700

    # What is kept of files is given up when memory is needed.
    stat = "file 130\nactive_file 20\ninactive_file 10\nfile_mapped 30\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert free_memory(tmp_path / "meminfo", tmp_path) == 730

    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 1000000 * 1024


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("print(80_000_000_000)", 80_000_000_000),
        ("print('ggml_cuda_init: found 1 device'); print(5)", 5),
        ("print('no number')", 0),
        ("raise SystemExit(1)", 0),
        ("", 0),
    ],
)
async def test_the_engine_is_asked_for_the_memory_of_gpus(
    script: str, found: int
) -> None:
    assert await free_memory_of_gpus(script) == found


async def test_children_see_the_gpus_of_their_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment: dict[str, str] = {}
    use_gpus((), environment)
    assert environment == {}
    use_gpus((1, 3), environment)
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    for name in environment:
        monkeypatch.setenv(name, "all")  # which restores it after the test

    use_gpus((1, 3))

    for name in environment.keys() - {"CUDA_DEVICE_ORDER"}:
        script = f"import os; print(os.environ['{name}'].replace(',', ''))"
        assert await free_memory_of_gpus(script) == 13


async def test_a_build_for_processors_uses_no_gpu() -> None:
    assert await free_memory_of_gpus() == 0


def test_this_machine_has_free_memory(tmp_path: Path) -> None:
    free = free_memory()
    assert free is None or free > 0

    half = free_memory(tmp_path / "none", tmp_path)
    assert half is None or half > 0


@pytest.mark.parametrize(
    ("logical", "physical", "threads"),
    [(1, 1, 1), (2, 2, 1), (2, 1, 1), (4, 2, 2), (4, 4, 3), (16, 8, 8), (64, 64, 63)],
)
def test_one_processor_is_left_for_other_load(
    logical: int, physical: int, threads: int
) -> None:
    assert threads_for(logical, physical) == threads


def test_this_machine_has_no_more_cores_than_processors() -> None:
    logical, physical = processors()

    assert 1 <= physical <= logical
