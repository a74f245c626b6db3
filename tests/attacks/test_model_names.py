"""Names of models and files from peers stay within their folders."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.transfer_pair import files
from shoal.domain.errors import InvalidRequest, PeerError
from shoal.domain.model_messages import ModelChunk
from shoal.models.library import Library
from shoal.models.names import check_file_name, check_model_name, model_folder_name
from shoal.models.staging import IncomingModel, Staging

VECTORS = Path(__file__).parents[1] / "protocols" / "tealenet" / "vectors"
CASES: list[dict[str, Any]] = [
    case
    for case in json.loads((VECTORS / "tealenet.json").read_text())["cases"]
    if case["group"] == "model_transfer_names"
]
CHECKS = {"fileName": check_file_name, "modelID": check_model_name}

# What others got out of folders with, and what some systems take for something else.
HOSTILE = [
    "../../../../../../../../tmp/x",
    "../.ssh/authorized_keys",
    "..\\..\\x",
    "/etc/cron.d/x",
    "//server/share/x",
    "~/x",
    "a/../../x",
    "a\0/../x",
    "%2e%2e%2fx",
    "..%c0%afx",
    "\N{FULLWIDTH FULL STOP}\N{FULLWIDTH FULL STOP}/x",
    "x\u202etxt",
    "CON",
    ".",
    " ",
    "-rf",
    "$(x)",
    "x\r\nx",
]
DRIVES = ["C:x", "x:stream", "C:"]  # tags of models, but no files
ANY_NAME = st.one_of(
    st.sampled_from(HOSTILE + DRIVES),
    st.text(max_size=30),
    st.text("./\\:aA0_-~ \0", max_size=12),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case["id"]))
def test_vectors(case: dict[str, Any]) -> None:
    ((check, name),) = [(CHECKS[kind], case[kind]) for kind in CHECKS if kind in case]

    if case["suggested"] == "accept":
        assert check(name) == name
    else:
        with pytest.raises(InvalidRequest):
            check(name)


def test_vectors_have_valid_and_hostile_names() -> None:
    assert {case["suggested"] for case in CASES} == {"accept", "reject"}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_rejected(name: str) -> None:
    for check in CHECKS.values():
        with pytest.raises(InvalidRequest):
            check(name)


@pytest.mark.parametrize("name", DRIVES)
def test_drives_and_streams_are_neither_files_nor_folders(name: str) -> None:
    with pytest.raises(InvalidRequest):
        check_file_name(name)
    assert ":" not in model_folder_name(name)


@given(ANY_NAME)
def test_accepted_names_stay_within_the_folder(name: str) -> None:
    root = Path("/models")
    for check in (check_file_name, model_folder_name):
        try:
            accepted = check(name)
        except InvalidRequest:
            continue
        path = (root / accepted).resolve()
        assert path.is_relative_to(root)
        assert path != root
        assert not any(part.startswith(".") for part in path.parts)


@given(ANY_NAME)
def test_names_are_only_looked_up(name: str) -> None:
    library = Library({"shared": Path(__file__)})

    assert (library.find(name) is not None) == (name == "shared")


@given(names=st.lists(ANY_NAME, max_size=20))
def test_peer_writes_only_into_its_staging_folder(
    tmp_path_factory: pytest.TempPathFactory, names: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("attacked")
    staging = Staging(folder / "models", "model", "id", 0, replace=False)
    incoming = IncomingModel("id", "model", None)
    staging.begin()
    accepted = set()

    for name in names:
        try:
            staging.write([incoming.add_chunk(ModelChunk("id", name, 0, b"!"))])
        except PeerError:
            continue
        accepted.add(name)

    staged = "models/.incoming/id"
    assert set(files(folder)) == {f"{staged}/files/{name}" for name in accepted} | {
        f"{staged}/lock"
    }
    staging.remove()
    assert files(folder) == {}


def test_link_in_the_staging_folder_is_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"precious")
    staging = Staging(tmp_path / "models", "model", "id", 0, replace=False)
    staging.begin()
    link = tmp_path / "models" / ".incoming" / "id" / "files" / "x"
    link.symlink_to(outside)
    incoming = IncomingModel("id", "model", None)

    with pytest.raises(Exception, match="File exists"):
        staging.write([incoming.add_chunk(ModelChunk("id", "x", 0, b"gone"))])
    staging.remove()

    assert outside.read_bytes() == b"precious"
