"""The contents of clients' files on the disk."""

from pathlib import Path

import pytest

from harness.synced import needs_folder_sync, synced_files
from shoal.domain.errors import StoreError
from shoal.store import file_folder
from shoal.store.file_folder import FileFolder


@needs_folder_sync
def test_finished_file_and_its_name_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FileFolder(tmp_path)
    folder.open()
    synced = synced_files(monkeypatch)
    writer = folder.begin("file-a")
    writer.write(b"results")

    writer.finish()

    assert synced == {"file-a"}
    assert (tmp_path / "file-a").read_bytes() == b"results"


def test_file_leaves_space_to_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FileFolder(tmp_path)
    folder.open()
    writer = folder.begin("file-a")
    writer.write(b"fits")
    monkeypatch.setattr(file_folder, "SPACE_KEPT", 1 << 62)

    with pytest.raises(StoreError, match="left to the database") as full:
        writer.write(b"does not")

    assert full.value.temporary
    assert full.value.located.startswith(f"{tmp_path / 'file-a'}: ")
    writer.discard()
    assert [*tmp_path.iterdir()] == []
