"""The coordinator that commands query."""

from argparse import Namespace
from pathlib import Path

import pytest

from shoal.cli.api import base_url
from shoal.config.secret_files import CERTIFICATE_FILE


@pytest.mark.parametrize(("certificate", "scheme"), [(False, "http"), (True, "https")])
def test_local_coordinator_is_queried_at_its_own_url(
    tmp_path: Path, certificate: bool, scheme: str
) -> None:
    if certificate:
        (tmp_path / CERTIFICATE_FILE).touch()

    url = base_url(Namespace(url=None, data_dir=tmp_path))

    assert url == f"{scheme}://127.0.0.1:4010"


def test_given_url_is_queried(tmp_path: Path) -> None:
    assert (
        base_url(Namespace(url="http://pool:1", data_dir=tmp_path)) == "http://pool:1"
    )
