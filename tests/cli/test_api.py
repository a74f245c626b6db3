"""Which coordinator the commands ask."""

from argparse import Namespace
from pathlib import Path

import pytest

from shoal.cli.api import base_url
from shoal.config.secret_files import CERTIFICATE_FILE


@pytest.mark.parametrize(("certificate", "scheme"), [(False, "http"), (True, "https")])
def test_coordinator_of_this_machine_is_asked_as_it_serves(
    tmp_path: Path, certificate: bool, scheme: str
) -> None:
    if certificate:
        (tmp_path / CERTIFICATE_FILE).touch()

    asked = base_url(Namespace(url=None, data_dir=tmp_path))

    assert asked == f"{scheme}://127.0.0.1:4010"


def test_url_that_is_given_is_asked(tmp_path: Path) -> None:
    assert (
        base_url(Namespace(url="http://pool:1", data_dir=tmp_path)) == "http://pool:1"
    )
