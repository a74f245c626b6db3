"""The files of a script: packed by whoever submits a run, unpacked by its members."""

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from shoal.domain.errors import ConfigError, InvalidRequest

FILES_MAX = 10_000
SIZE_MAX = 1 << 30  # bytes of all files
ARCHIVE_MAX = 256 << 20  # bytes of them together, compressed: one blob
TOGETHER_MAX = 64 << 20  # bytes of output that are returned together
PIECE_MAX = 32 << 20  # bytes of a piece of what is beyond
COMPRESSION = 1  # of zlib's levels: code shrinks fourfold, and most data not at all
EARLIEST = (1980, 1, 1, 0, 0, 0)  # equal files make equal archives

Contents: TypeAlias = bytes | list[str]
"""Those of a file: its bytes, or the SHA-256 of its pieces, which are stored apart."""


def pack_script(script: Path, beside: Sequence[Path]) -> bytes:
    """Return an archive of a script, and of files and folders beside it.

    A folder keeps its name; hidden files and ``__pycache__`` are left out.

    Raises ConfigError naming what is missing, twice there, or too large.
    """
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such file")
    archive, size = io.BytesIO(), 0
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for name, file in _named_files(script, beside):
            size += file.stat().st_size
            if len(target.namelist()) >= FILES_MAX or size > SIZE_MAX:
                raise ConfigError(
                    f"the script and its files exceed {FILES_MAX} files or "
                    f"{SIZE_MAX >> 20} MiB at {file}: put data where the workers read "
                    "it, and pass its place as an argument"
                )
            if name in target.namelist():
                raise ConfigError(f"--with: two files are named {name}: rename one")
            info = zipfile.ZipInfo(name, EARLIEST)
            info.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(info, file.read_bytes(), compresslevel=COMPRESSION)
    if archive.tell() > ARCHIVE_MAX:
        raise ConfigError(
            f"the script and its files have {archive.tell() >> 20} MiB compressed, and "
            f"at most {ARCHIVE_MAX >> 20} MiB can be sent: put data where the workers "
            "read it, and pass its place as an argument"
        )
    return archive.getvalue()


def _named_files(script: Path, beside: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the files with their names in the working folder."""
    yield script.name, script
    for each in beside:
        if each.is_file():
            yield each.name, each
        elif each.is_dir():
            folder = each.resolve()
            for file in sorted(folder.rglob("*")):
                inner = file.relative_to(folder)
                left_out = any(
                    part.startswith(".") or part == "__pycache__"
                    for part in inner.parts
                )
                if file.is_file() and not left_out:
                    yield str(PurePosixPath(folder.name, *inner.parts)), file
        else:
            raise ConfigError(f"--with {each}: there is no such file or folder")


def unpack_script(archive: bytes, folder: Path) -> None:
    """Unpack an archive into an empty folder.

    Raises InvalidRequest if it is damaged, or a name leads out of the folder.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as source:
            files = source.infolist()
            size = sum(each.file_size for each in files)
            if len(files) > FILES_MAX or size > SIZE_MAX:
                raise InvalidRequest("the script has too many files, or too large ones")
            for each in files:
                name = PurePosixPath(each.filename)
                if name.is_absolute() or ".." in name.parts:
                    raise InvalidRequest(f"a file of the script is named {name}")
                source.extract(each, folder)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError) as error:
        raise InvalidRequest(f"the files of the script: {error}") from error


def collect_output(folder: Path, store: Callable[[bytes], str]) -> dict[str, Contents]:
    """Return the files that a script left in its output folder, by name.

    ``store`` stores a piece, and returns its SHA-256: files beyond ``TOGETHER_MAX``.

    Raises InvalidRequest if there are too many.
    """
    found: dict[str, Contents] = {}
    size = 0
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        size += file.stat().st_size
        if len(found) >= FILES_MAX:
            raise InvalidRequest(
                f"the script left more than {FILES_MAX} files in its output folder: "
                "pack them together"
            )
        name = file.relative_to(folder).as_posix()
        if size <= TOGETHER_MAX:
            found[name] = file.read_bytes()
            continue
        with file.open("rb") as opened:
            pieces = iter(lambda: opened.read(PIECE_MAX), b"")
            found[name] = [store(each) for each in pieces]
    return found


def write_output(
    files: Mapping[str, Contents], folder: Path, fetch: Callable[[str], bytes]
) -> None:
    """Write the files that a run returned; names that lead out of it are refused.

    ``fetch`` returns a piece, by its SHA-256.  Raises InvalidRequest, OSError.
    """
    for name, contents in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise InvalidRequest(f"the run returned a file named {name!r}")
        target = folder.joinpath(*path.parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as opened:
            if isinstance(contents, bytes):
                opened.write(contents)
                continue
            for each in contents:
                opened.write(fetch(each))
