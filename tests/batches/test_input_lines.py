"""The lines of an input file, by their numbers."""

from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.batches import input_lines
from shoal.batches.input_lines import InputLines
from shoal.domain.errors import InvalidRequest
from shoal.store.file_folder import FileFolder

MARKS = (BOM_UTF8, BOM_UTF16_LE, BOM_UTF16_BE)


def lines_of(folder: Path, content: bytes) -> InputLines:
    files = FileFolder(folder)
    files.open()
    files.remove("f")
    writer = files.begin("f")
    writer.write(content)
    writer.finish()
    return InputLines(files, "f")


@given(
    lines=st.lists(
        st.binary(min_size=1).filter(lambda b: b"\n" not in b and b.strip()),
        min_size=1,
    ).filter(lambda lines: not lines[0].startswith(MARKS)),
    mark=st.sampled_from([b"", BOM_UTF8, BOM_UTF8 + b"\n"]),
    between=st.sampled_from([b"\n", b"\n\r\n \n"]),
    end=st.sampled_from([b"", b"\n", b"\n\n \n\r\n"]),
    piece=st.integers(1, 9),
)
def test_lines_are_found_however_the_file_is_read(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    mark: bytes,
    between: bytes,
    end: bytes,
    piece: int,
) -> None:
    content = mark + between.join(lines) + end
    with mock.patch.object(input_lines, "PIECE", piece):
        found = lines_of(tmp_path_factory.mktemp("f"), content)

    assert len(found) == len(lines)
    read = [
        found.read(number).removesuffix(b"\n") for number in range(1, len(lines) + 1)
    ]
    assert read == lines
    together = found.read_from(1, 10)
    assert [each.removesuffix(b"\n") for each in together] == lines[: len(together)]
    assert together


def test_empty_lines_do_not_count_and_the_others_keep_their_numbers(
    tmp_path: Path,
) -> None:
    found = lines_of(tmp_path, b"\na\n \r\n\nb\n\n")

    assert found.read_from(1, 100) == [b"a\n", b"b\n"]
    assert [*found.numbers] == [2, 5]


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be"])
def test_file_in_another_encoding_is_refused_by_its_name(
    codec: str, tmp_path: Path
) -> None:
    text = '{"a": 1}\n' if codec == "utf-16" else '\ufeff{"a": 1}\n'

    with pytest.raises(InvalidRequest, match="in UTF-16: save it in UTF-8"):
        lines_of(tmp_path, text.encode(codec))


def test_mark_at_the_beginning_is_no_part_of_a_line(tmp_path: Path) -> None:
    assert lines_of(tmp_path, BOM_UTF8 + b"a\nb").read(1) == b"a\n"
    with pytest.raises(InvalidRequest, match="no lines"):
        lines_of(tmp_path, BOM_UTF8 + b"\n")


@pytest.mark.parametrize("content", [b"", b"\n", b" \n\r\n\n"])
def test_file_without_lines_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidRequest, match="no lines"):
        lines_of(tmp_path, content)


def test_too_many_lines_are_refused(tmp_path: Path) -> None:
    with mock.patch.object(input_lines, "LINES_MAX", 3):
        assert len(lines_of(tmp_path, b"a\nb\nc\n")) == 3
        with pytest.raises(InvalidRequest, match="more than 3 lines"):
            lines_of(tmp_path, b"a\nb\nc\nd")
        with pytest.raises(InvalidRequest, match="more than 3 lines"):
            lines_of(tmp_path, b"a\n" + b"\n" * 6)


def test_line_that_is_too_long_is_refused_by_its_number(tmp_path: Path) -> None:
    with (
        mock.patch.object(input_lines, "LINE_MAX", 3),
        pytest.raises(InvalidRequest, match="line 2 has more than 3 bytes"),
    ):
        lines_of(tmp_path, b"a\nbbbb\n")
