"""Checkpoints on a disk: whole and right, or not there."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from harness.slow_imports import checkpoint_folder, torch

PIECE = 4096  # bytes; with it, a small state has several pieces


def state(step: int = 0) -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(step)
    shared = torch.randn(10, 7, generator=numbers)
    return {
        "model": {
            "embed": shared,
            "head": shared,  # tied
            "large": torch.randn(3000, generator=numbers),
            "half": torch.randn(5, generator=numbers).to(torch.bfloat16),
            "flags": torch.tensor([True, False]),
            "count": torch.tensor(step),
            "nothing": torch.empty(0, 3),
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1},
        "sampler": {"position": step},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(each, other[key]) for key, each in one.items()
        )
    return bool(one == other)


def test_a_checkpoint_comes_back_bit_by_bit(tmp_path: Path) -> None:
    kept = checkpoint_folder.CheckpointFolder(tmp_path / "run")
    saved = state(7)

    digest = kept.save(7, saved, ranks=[{"seed": 1}], piece_max=PIECE)

    found = checkpoint_folder.CheckpointFolder(tmp_path / "run").load_latest()
    assert found is not None
    assert same(found.state, saved)
    assert (found.step, found.ranks, found.digest) == (7, [{"seed": 1}], digest)
    files = sorted((tmp_path / "run" / "step-00000007").glob("*.safetensors"))
    assert len(files) > 4
    assert max(each.stat().st_size for each in files) <= PIECE


def test_other_programs_read_the_model_by_its_names(tmp_path: Path) -> None:
    checkpoint_folder.CheckpointFolder(tmp_path).save(1, state())

    with safe_open(
        tmp_path / "step-00000001" / "model-00001.safetensors", framework="pt"
    ) as opened:
        assert {*opened.keys()} == {*state()["model"]}
        assert opened.get_tensor("embed").shape == (10, 7)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    kept = checkpoint_folder.CheckpointFolder(tmp_path, keep=2)

    for step in (5, 10, 15, 20):
        kept.save(step, {"sampler": {"position": step}})

    assert kept.steps == [15, 20]
    assert {each.name for each in tmp_path.iterdir()} == {
        "step-00000015",
        "step-00000020",
    }


def test_every_changed_file_is_noticed_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = checkpoint_folder.CheckpointFolder(tmp_path)
    kept.save(1, state(1), piece_max=PIECE)
    kept.save(2, state(2), piece_max=PIECE)
    files = sorted((tmp_path / "step-00000002").iterdir())

    for file in files:
        whole = file.read_bytes()
        middle = len(whole) // 2
        for damaged in (
            whole[:-1],
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            None,
        ):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            if file.name == "manifest.json" and damaged is None:
                assert kept.steps == [1]
            else:
                with pytest.raises(
                    checkpoint_folder.DamagedCheckpoint, match=file.name
                ):
                    kept.load(2)
            found = kept.load_latest()
            assert found is not None
            assert found.step == 1
        file.write_bytes(whole)

    assert kept.load(2).step == 2
    assert len(files) > 4
    assert "checkpoint skipped step=2" in caplog.text


def test_a_damaged_checkpoint_does_not_displace_a_good_one(tmp_path: Path) -> None:
    kept = checkpoint_folder.CheckpointFolder(tmp_path, keep=1)
    kept.save(10, state(10))
    later = tmp_path / "step-00000020"
    later.mkdir()
    (later / "manifest.json").write_text("{}")

    kept.save(11, state(11))

    found = kept.load_latest()
    assert found is not None
    assert found.step == 11
    assert kept.steps == [11]


def test_an_existing_checkpoint_of_the_step_is_replaced(tmp_path: Path) -> None:
    kept = checkpoint_folder.CheckpointFolder(tmp_path)
    kept.save(3, state(1))

    kept.save(3, state(2))

    assert same(kept.load(3).state, state(2))
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000003"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    kept = checkpoint_folder.CheckpointFolder(tmp_path)
    incoming = kept.begin("9")
    (incoming / "model-00001.safetensors").write_bytes(b"half")
    (tmp_path / ".rank-of-a-killed-run-0").touch()

    assert kept.steps == []
    kept.save(10, state())

    assert [each.name for each in tmp_path.iterdir()] == ["step-00000010"]


def test_other_formats_are_refused(tmp_path: Path) -> None:
    checkpoint_folder.CheckpointFolder(tmp_path).save(1, state())
    manifest = tmp_path / "step-00000001" / checkpoint_folder.MANIFEST
    document = json.loads(manifest.read_text())
    document["content"]["format"] = 2
    document["digest"] = checkpoint_folder._digest(document["content"])
    manifest.write_text(json.dumps(document))

    with pytest.raises(
        checkpoint_folder.DamagedCheckpoint,
        match="has format 2, and this Shoal reads 1",
    ):
        checkpoint_folder.CheckpointFolder(tmp_path).load(1)


@contextmanager
def file_size_max(size: int) -> Iterator[None]:
    """Make larger files fail as on a full disk.  The limit is that of the process."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_full_disk_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    kept = checkpoint_folder.CheckpointFolder(tmp_path)
    kept.save(1, {"model": {"w": torch.ones(10)}})

    with file_size_max(100_000), pytest.raises(OSError, match="too large"):
        kept.save(2, {"model": {"w": torch.ones(100_000)}})

    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]
    assert kept.load(1).step == 1
