"""``make man``: the manual pages of all commands."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.speed import scaled
from shoal.cli.main import PLACES

# Writing them imports all commands, in a process of its own.
pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[1] / "scripts" / "write_man.py"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("man")
    done = run(sys.executable, str(SCRIPT), str(folder))
    assert done.returncode == 0, done.stderr
    return folder


def test_each_command_has_a_page_with_its_options(pages: Path) -> None:
    whole = (pages / "shoal.1").read_text()
    for name in PLACES:
        assert rf"\fBshoal-{name}(1)\fP" in whole
        assert f".B shoal {name}\n" in (pages / f"shoal-{name}.1").read_text()
    named = re.findall(r"See \\fB([^(]+)\(1\)", (pages / "shoal-keys.1").read_text())
    assert named == [f"shoal-keys-{each}" for each in ("create", "ls", "revoke")]
    page = (pages / "shoal-keys-create.1").read_text()

    assert r"shoal\-keys\-create \- Create a key and print it, once." in page
    assert "\n[OPTIONS] NAME\n" in page
    assert r"\fB\-\-expires\fP TIME" in page
    assert "[URL]: URL of the coordinator" in (pages / "shoal-join.1").read_text()
    assert not any(str(Path.home()) in each.read_text() for each in pages.iterdir())


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_pages_render_without_warnings(pages: Path) -> None:
    files = sorted(map(str, pages.iterdir()))

    checked = run("groff", "-man", "-ww", "-z", "-Kutf8", *files)
    shown = run(
        "groff", "-man", "-Tascii", "-P-cbou", str(pages / "shoal-completion.1")
    )

    assert (checked.returncode, checked.stderr) == (0, "")
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["NAME"] in lines
    fish = "fish shoal completion fish > ~/.config/fish/completions/shoal.fish"
    assert fish.split() in lines
