"""The shared library and how its files are read."""

from pathlib import Path

import pytest

from shoal.domain.errors import ConfigError
from shoal.models.library import (
    CHUNK,
    Library,
    NotShareable,
    open_library,
    read_pieces,
    shareable_library,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files used to record another program, and a hidden one."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "exact.bin").write_bytes(b"e" * CHUNK)
    (model / "config.json").write_bytes(b"{}")
    (model / "weights.bin").write_bytes(b"w" * (CHUNK + 4))
    (model / "empty.bin").touch()
    (model / ".hidden").write_bytes(b"secret")
    return model


def test_folder_is_sent_in_order_of_file_names(folder: Path) -> None:
    model = Library({"m": folder}).find("m")
    assert model is not None

    sent = [(p.file_name, p.offset, len(p.data), p.last) for p in read_pieces(model)]

    assert model.size == 2 + CHUNK + CHUNK + 4
    assert sent == [
        ("config.json", 0, 2, True),
        ("empty.bin", 0, 0, True),
        ("exact.bin", 0, CHUNK, True),
        ("weights.bin", 0, CHUNK, False),
        ("weights.bin", CHUNK, 4, True),
    ]


def test_single_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    (tmp_path / "other").touch()

    model = Library({"m": file}).find("m")

    assert model is not None
    assert [each.path for each in model.files] == [file]


def test_models_that_come_and_go_are_shared_beside_those_of_the_start(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    for each in (first, second):
        each.write_bytes(b"GGUF")
    library = Library({"m": first})

    library.share({"m": second, "n": second})

    assert library.names == ["m", "n"]
    found = library.find("m"), library.find("n")
    assert [each and each.files[0].path for each in found] == [first, second]
    library.share({})
    assert library.find("n") is None


def test_file_is_sent_with_its_projector(tmp_path: Path) -> None:
    for name in ("m-Q4_0", "m-Q8_0", "a-mmproj"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")

    model = Library({"m": tmp_path / "m-Q8_0.gguf"}).find("m")

    assert model is not None
    assert [each.name for each in model.files] == ["a-mmproj.gguf", "m-Q8_0.gguf"]


def test_split_file_is_sent_with_all_parts(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / f"big-0000{number}-of-00002.gguf").write_bytes(b"GGUF")

    model = Library({"m": tmp_path / "big-00001-of-00002.gguf"}).find("m")

    assert model is not None
    assert (len(model.files), model.size) == (2, 8)


@pytest.mark.parametrize("name", ["", "..", "../secret", "M", "model", "m/"])
def test_only_listed_names_are_shared(folder: Path, name: str) -> None:
    (folder.parent / "secret").touch()

    assert Library({"m": folder}).find(name) is None


def test_nested_folder_is_not_shared(folder: Path) -> None:
    (folder / "onnx").mkdir()

    with pytest.raises(NotShareable, match="onnx is a folder, and a shared model"):
        Library({"m": folder}).find("m")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file that is not shared, beside the model's folder."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"password")
    return secret


def test_links_out_of_the_folder_are_not_followed(folder: Path, secret: Path) -> None:
    targets = [secret, Path("/etc/passwd"), Path("../secret"), folder / "../secret"]
    for number, target in enumerate(targets):
        link = folder / f"{number}.bin"
        link.symlink_to(target)

        with pytest.raises(NotShareable, match=r"is a link to .*, outside the folder"):
            Library({"m": folder}).find("m")

        link.unlink()


def test_links_to_folders_are_not_followed(folder: Path) -> None:
    (folder / "more").symlink_to(folder.parent, target_is_directory=True)

    with pytest.raises(NotShareable, match="more is a folder"):
        Library({"m": folder}).find("m")


@pytest.mark.parametrize("target", ["none", "self"])
def test_links_to_nothing_are_not_shared(folder: Path, target: str) -> None:
    (folder / "self").symlink_to(target)

    with pytest.raises(NotShareable, match="self is not a file"):
        Library({"m": folder}).find("m")


def test_links_inside_the_folder_are_sent_under_their_names(folder: Path) -> None:
    (folder / "again.json").symlink_to("config.json")

    model = Library({"m": folder}).find("m")

    assert model is not None
    again = model.files[0]
    assert (again.name, again.path) == ("again.json", folder / "config.json")


def test_folder_may_itself_be_a_link(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)

    model = Library({"m": link}).find("m")

    assert model is not None
    assert {each.path.parent for each in model.files} == {folder}


def test_links_into_a_cache_of_models_are_followed(
    folder: Path, secret: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    (cache / "lmstudio").mkdir(parents=True)
    cached = cache / "lmstudio" / "more.bin"
    cached.write_bytes(b"more")
    (folder / "more.bin").symlink_to(cached)

    model = Library({"m": folder}, [cache]).find("m")

    assert model is not None
    assert [each.path for each in model.files if each.name == "more.bin"] == [cached]
    (folder / "other.bin").symlink_to(secret)
    with pytest.raises(NotShareable, match="outside the folder"):
        Library({"m": folder}, [cache]).find("m")


def test_snapshot_of_a_hub_in_any_folder_is_shared(
    tmp_path: Path, secret: Path
) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "f00d").write_bytes(b"GGUF")
    file = snapshot / "m.gguf"
    file.symlink_to("../../blobs/f00d")

    for path in (snapshot, file):
        model = Library({"m": path}).find("m")
        assert model is not None
        assert [each.file_name for each in read_pieces(model)] == ["m.gguf"]

    (snapshot / "other.bin").symlink_to(secret)
    with pytest.raises(NotShareable, match="outside the folder"):
        Library({"m": snapshot}).find("m")


def test_file_that_the_user_names_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "f00d"
    target.write_bytes(b"GGUF")
    link = tmp_path / "tiny.gguf"
    link.symlink_to(target)

    model = Library({"m": link}).find("m")

    assert model is not None
    assert [(each.name, each.path) for each in model.files] == [("tiny.gguf", target)]


def test_contents_that_cannot_be_shared_do_not_prevent_the_start(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "onnx").mkdir()

    library = open_library([("m", folder)])

    (record,) = caplog.records
    assert "not shared model=m" in record.getMessage()
    (folder / "onnx").rmdir()
    assert library.find("m") is not None  # once it is gone


def test_files_with_unsafe_names_are_not_shared(folder: Path) -> None:
    (folder / "with blank").touch()

    with pytest.raises(NotShareable, match="'with blank' is not a valid name"):
        Library({"m": folder}).find("m")


@pytest.mark.parametrize("missing", ["nothing", "empty"])
def test_missing_file_is_not_shared(tmp_path: Path, missing: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match=f"m cannot be shared: .*{missing}"):
        open_library([("m", tmp_path / missing)])


def test_later_removed_model_is_not_shareable(folder: Path) -> None:
    library = open_library([("m", folder)])
    folder.rename(folder.with_name("elsewhere"))

    with pytest.raises(NotShareable, match="no such file"):
        library.find("m")


@pytest.mark.parametrize(
    ("content", "change"), [(b"w", "was truncated"), (b"w" * (CHUNK + 5), "has grown")]
)
def test_changed_file_aborts_the_transfer(
    folder: Path, content: bytes, change: str
) -> None:
    model = Library({"m": folder}).find("m")
    assert model is not None
    (folder / "weights.bin").write_bytes(content)

    with pytest.raises(NotShareable, match=f"weights.bin {change}"):
        list(read_pieces(model))


def test_invalid_names_are_rejected_at_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"'\.\./m' is not a valid name of a"):
        open_library([("../m", folder)])
    with pytest.raises(ConfigError, match="--share m: given twice"):
        open_library([("m", folder), ("m", folder / "config.json")])


def test_unshareable_offered_models_are_omitted(folder: Path) -> None:
    library = shareable_library(
        [("m", folder), ("n", folder / "none"), ("not this", folder)]
    )

    assert library.names == ["m"]
