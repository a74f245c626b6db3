"""How much memory there is for a model."""

from pathlib import Path

from shoal.engines.memory import free_memory

MEMINFO = "MemTotal:       24000000 kB\nMemAvailable:   1000000 kB\n"


def test_linux_says_what_is_available(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)

    assert free_memory(tmp_path / "meminfo", tmp_path) == 1000000 * 1024


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 700

    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == 1000000 * 1024


def test_this_machine_has_some(tmp_path: Path) -> None:
    free = free_memory()
    assert free is None or free > 0

    half = free_memory(tmp_path / "none", tmp_path)
    assert half is None or half > 0
