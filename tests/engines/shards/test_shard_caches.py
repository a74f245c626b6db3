"""The disk space of the caches of shards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.engines.shards.shard_caches import trim_caches

MEBIBYTE = 1 << 20


@pytest.fixture
def caches(tmp_path: Path) -> Path:
    """Caches of three models, of one MiB each, in the order of their names."""
    folder = tmp_path / "caches"
    for age, name in enumerate(("a", "b", "c")):
        (folder / name / "rpc").mkdir(parents=True)
        (folder / name / "rpc" / "layer").write_bytes(os.urandom(MEBIBYTE))
        os.utime(folder / name, (age, age))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_caches_within_the_limit_stay(caches: Path) -> None:
    trim_caches(caches, 3 * MEBIBYTE + 100_000)

    assert names(caches) == ["a", "b", "c"]


def test_caches_used_longest_ago_are_removed(caches: Path) -> None:
    trim_caches(caches, 2 * MEBIBYTE + 100_000)
    assert names(caches) == ["b", "c"]

    trim_caches(caches, 100_000)
    assert names(caches) == []


def test_cache_that_is_used_stays_and_is_the_latest(caches: Path) -> None:
    trim_caches(caches, MEBIBYTE + 100_000, [caches / "a"])

    assert names(caches) == ["a"]


def test_cache_that_is_larger_than_all_may_be_is_removed(caches: Path) -> None:
    (caches / "a" / "more").write_bytes(os.urandom(3 * MEBIBYTE))

    trim_caches(caches, 2 * MEBIBYTE, [caches / "a"])

    assert "a" not in names(caches)


@pytest.mark.skipif(sys.platform == "win32", reason="needs rights for links")
def test_links_in_a_cache_lead_nowhere(caches: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "file").write_bytes(os.urandom(4 * MEBIBYTE))
    (caches / "a" / "link").symlink_to(own)
    (caches / "z").symlink_to(own)

    trim_caches(caches, 3 * MEBIBYTE + 100_000)
    assert names(caches) == ["a", "b", "c", "z"]

    trim_caches(caches, 0)
    assert names(caches) == ["z"]
    assert (own / "file").stat().st_size == 4 * MEBIBYTE


@pytest.mark.skipif(sys.platform == "win32", reason="has shorter paths")
def test_deep_folders_do_no_harm(caches: Path) -> None:
    here = Path.cwd()
    try:
        os.chdir(caches / "a")
        for _ in range(2500):  # beyond the length of any path
            os.mkdir("deep")
            os.chdir("deep")
    finally:
        os.chdir(here)

    trim_caches(caches, 0)

    assert names(caches) in ([], ["a"])
    # Python removes no such folder before pytest's own end.
    subprocess.run(["rm", "-rf", caches / "a"], check=True)


def test_missing_folder_has_nothing_to_remove(tmp_path: Path) -> None:
    trim_caches(tmp_path / "none", 0, [tmp_path / "none" / "a"])
