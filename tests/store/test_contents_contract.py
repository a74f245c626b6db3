"""What every store of contents promises."""

import io

import pytest

from shoal.domain.errors import StoreError
from shoal.store.contents import ContentStore
from shoal.store.postgres.contents import PART_SIZE

LONG = bytes(range(256)) * (2 * PART_SIZE // 256) + b"end"


def write(contents: ContentStore, file_id: str, *pieces: bytes) -> None:
    writer = contents.begin(file_id)
    for each in pieces:
        writer.write(each)
    assert (writer.id, writer.size) == (file_id, sum(map(len, pieces)))
    writer.finish()


def read(contents: ContentStore, file_id: str) -> bytes:
    with contents.read(file_id) as file:
        return file.read()


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (b"",),
        (b"one",),
        (b"one", b"two"),
        (LONG,),
        (LONG[:PART_SIZE],),
        (LONG[: PART_SIZE - 1], LONG[PART_SIZE - 1 : PART_SIZE + 1]),
    ],
    ids=range(7),
)
def test_contents_are_read_as_they_were_written(
    contents: ContentStore, pieces: tuple[bytes, ...]
) -> None:
    write(contents, "file-a", *pieces)

    assert contents.has("file-a")
    assert read(contents, "file-a") == b"".join(pieces)
    assert contents.open() == {"file-a": sum(map(len, pieces))}


def test_any_place_can_be_read(contents: ContentStore) -> None:
    write(contents, "file-a", LONG)

    with contents.read("file-a") as file:
        for begin, size in (
            (0, 3),
            (PART_SIZE - 2, 4),
            (PART_SIZE, PART_SIZE),
            (len(LONG) - 3, 9),
            (len(LONG) + 5, 1),
        ):
            assert file.seek(begin) == begin
            assert file.read(size) == LONG[begin : begin + size]
        assert file.seek(-3, io.SEEK_END) == len(LONG) - 3
        assert file.read() == b"end"


def test_contents_are_not_there_before_they_are_finished(
    contents: ContentStore,
) -> None:
    writer = contents.begin("file-a")
    writer.write(LONG)

    assert not contents.has("file-a")
    with pytest.raises(StoreError):
        contents.read("file-a")
    writer.finish()

    assert contents.has("file-a")


@pytest.mark.parametrize("finished", [False, True])
def test_discarded_contents_leave_nothing(
    contents: ContentStore, finished: bool
) -> None:
    writer = contents.begin("file-a")
    writer.write(LONG)
    if finished:
        writer.finish()

    writer.discard()
    writer.discard()

    assert not contents.has("file-a")
    write(contents, "file-a", b"again")
    assert read(contents, "file-a") == b"again"


def test_removed_contents_are_gone(contents: ContentStore) -> None:
    write(contents, "file-a", LONG)
    write(contents, "file-b", b"b")

    contents.remove("file-a")
    contents.remove("file-a")

    assert [*contents.open()] == ["file-b"]
    assert not contents.has("file-a")


def test_what_a_start_finds_unfinished_is_deleted(contents: ContentStore) -> None:
    write(contents, "file-a", b"a")
    unfinished = contents.begin("file-b")
    unfinished.write(LONG)

    assert [*contents.open()] == ["file-a"]

    assert not contents.has("file-b")
    unfinished.discard()


def test_contents_set_aside_are_not_found_again(contents: ContentStore) -> None:
    for each in ("file-a", "file-b"):
        write(contents, each, b"x")

    assert contents.set_aside(["file-a"])

    assert [*contents.open()] == ["file-b"]
    assert not contents.has("file-a")
