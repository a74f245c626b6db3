"""Checkpoints of several ranks, over sockets, on disks that they share or not."""

import shutil
from pathlib import Path

from harness.slow_imports import checkpoint_folder, group_checkpoints
from shoal.training.group import RankGroup
from training.checkpoints.test_folder import PIECE, same, state
from training.test_group import groups, together

RANKS = 3


def save(
    members: list[RankGroup], folders: list[Path], step: int
) -> "list[group_checkpoints.SavedCheckpoint]":
    def one(group: RankGroup) -> "group_checkpoints.SavedCheckpoint":
        rank = group.place.rank
        checkpoints = group_checkpoints.GroupCheckpoints(
            folders[rank], group, piece_max=PIECE
        )
        return checkpoints.save(step, state(step), own={"rank": rank})

    return together(members, one)


def load(
    members: list[RankGroup], folders: list[Path]
) -> "list[checkpoint_folder.TrainingCheckpoint | None]":
    return together(
        members,
        lambda group: group_checkpoints.GroupCheckpoints(
            folders[group.place.rank], group
        ).load_latest(),
    )


def assert_all_have(
    found: "list[checkpoint_folder.TrainingCheckpoint | None]", step: int
) -> None:
    for each in found:
        assert each is not None
        assert each.step == step
        assert same(each.state, state(step))
        assert each.ranks == [{"rank": rank} for rank in range(RANKS)]


def test_ranks_with_one_folder_write_a_checkpoint_together(tmp_path: Path) -> None:
    with groups(RANKS) as members:
        saved = save(members, [tmp_path] * RANKS, 4)
        found = load(members, [tmp_path] * RANKS)

    assert saved == [group_checkpoints.SavedCheckpoint(4, 1, [])] * RANKS
    assert_all_have(found, 4)
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000004"]


def test_ranks_with_folders_of_their_own_have_a_whole_one_each(tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / ".rank-killed-1").touch()  # a mark of a killed run

    with groups(RANKS) as members:
        saved = save(members, folders, 4)
    shutil.rmtree(folders[0])
    with groups(RANKS) as members:
        found = load(members, folders)

    assert saved == [group_checkpoints.SavedCheckpoint(4, 3, [])] * RANKS
    assert_all_have(found, 4)  # the new machine got it from another
    assert [each.name for each in folders[1].iterdir()] == ["step-00000004"]


def test_the_last_checkpoint_wins_wherever_it_is(tmp_path: Path) -> None:
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    with groups(RANKS) as members:
        save(members, folders, 4)
        save(members, folders, 8)
    for rank in (0, 2):
        damaged = folders[rank] / "step-00000008" / "model-00001.safetensors"
        damaged.write_bytes(b"x" + damaged.read_bytes()[1:])

    with groups(RANKS) as members:
        found = load(members, folders)

    assert_all_have(found, 8)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    with groups(RANKS) as members:
        assert load(members, [tmp_path] * RANKS) == [None] * RANKS


def test_a_disk_that_fails_is_an_error_that_all_ranks_know(tmp_path: Path) -> None:
    # A file in the folder's place, as no test can rely on a disk of its own.
    folders = [tmp_path / str(rank) for rank in range(RANKS)]
    folders[1].write_text("a file")

    with groups(RANKS) as members:
        saved = save(members, folders, 4)
        found = load(members, folders)

    assert saved[0].errors == [f"rank 1: cannot write to {folders[1]}: File exists"]
    assert saved == [group_checkpoints.SavedCheckpoint(4, 2, saved[0].errors)] * RANKS
    assert_all_have(found, 4)
