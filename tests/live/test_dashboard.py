"""``shoal dashboard`` at a terminal, with a browser that notes what it opens."""

import os
import sys
from pathlib import Path

import pexpect
import pytest

from live.programs import PATIENCE, Programs
from shoal.cli.pool.invitations import OTHER_USERS, has_other_users

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pexpect needs a pty")


@pytest.mark.parametrize("flags", [[], ["--no-browser"]])
def test_browser_is_opened_at_a_terminal(
    programs: Programs, tmp_path: Path, flags: list[str]
) -> None:
    folder = tmp_path / "data"
    serve = programs.run("serve", "--json", "--port", "0", "--data-dir", str(folder))
    url = serve.event("ready")["url"]
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o700)

    terminal = pexpect.spawn(
        sys.executable,
        ["-m", "shoal", "dashboard", "--data-dir", str(folder), *flags],
        encoding="utf-8",
        timeout=PATIENCE,
        dimensions=(50, 200),
        env={**os.environ, "BROWSER": str(browser), "DISPLAY": ":0"},
    )
    printed = terminal.read()
    terminal.close()

    assert terminal.exitstatus == 0
    link, *remarks = printed.split("\r\n")
    assert link.startswith(f"{url}/#signin=")
    if flags:
        assert not opened.exists()
    elif has_other_users():
        assert OTHER_USERS in " ".join(remarks)
        assert not opened.exists()
    else:
        assert opened.read_text().strip() == link
