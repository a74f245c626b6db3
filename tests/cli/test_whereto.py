"""Which coordinator is meant, and what is known of it."""

from pathlib import Path

import pytest
import trustme

from shoal.cli.whereto import target
from shoal.domain.errors import ConfigError
from shoal.transports.tls import fingerprint_of


def test_the_coordinator_of_this_machine_is_meant_where_none_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "join-token").write_text("secret\n")

    there = target("", "auto", "", tmp_path)

    assert there.url == "http://127.0.0.1:4010"
    assert there.token == "secret"
    assert there.protocol.name == "grandsage"


def test_a_token_that_was_given_goes_before_the_one_in_the_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "join-token").write_text("secret\n")

    assert target("", "auto", "mine", tmp_path).token == "mine"


def test_the_folders_token_goes_to_no_other_coordinator(tmp_path: Path) -> None:
    (tmp_path / "join-token").write_text("secret\n")

    assert target("http://elsewhere:4010", "auto", "", tmp_path).token == ""


def test_without_a_folder_there_is_no_token(tmp_path: Path) -> None:
    assert target("", "auto", "", tmp_path / "none").token == ""


def test_a_coordinator_with_a_certificate_is_known_by_it(
    tmp_path: Path, certificate: str
) -> None:
    (tmp_path / "certificate.pem").write_text(certificate)

    there = target("", "auto", "", tmp_path)

    assert there.url == "https://127.0.0.1:4010"
    assert there.fingerprint == fingerprint_of(certificate)


@pytest.fixture
def certificate() -> str:
    authority = trustme.CA()
    (chain,) = authority.issue_cert("127.0.0.1").cert_chain_pems
    return chain.bytes().decode()


@pytest.mark.parametrize(
    ("url", "wire", "said"),
    [
        ("nonsense", "auto", "cannot tell the wire"),
        ("http://127.0.0.1", "pigeon", "there is no such wire"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(
    url: str, wire: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        target(url, wire, "", tmp_path)


def test_a_token_in_a_url_is_not_shown(tmp_path: Path) -> None:
    there = target("ws://host/ws?token=secret", "auto", "", tmp_path)

    assert there.shown == "ws://host/ws"
