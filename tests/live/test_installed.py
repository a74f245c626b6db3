"""A copy of Shoal that was installed from a wheel."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SCRIPT = "from shoal.config.installation import *; print(install_extra('joblib'))"


class Copy:
    """An environment with a wheel; other packages come from that of the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
        run(sys.executable, *build, str(folder), str(ROOT))
        (self.wheel,) = folder.glob("*.whl")
        venv.create(folder / "env")  # pip, too, comes from that of the tests
        self.bin = folder / "env" / "bin"
        paths = {"base": str(folder / "env")}
        site = Path(sysconfig.get_path("purelib", "venv", vars=paths))
        (site / "tests.pth").write_text(sysconfig.get_path("purelib"))
        install = ["-m", "pip", "install", "--quiet", "--no-deps"]
        run(str(self.bin / "python"), *install, str(self.wheel))

    def install_command(self) -> str:
        return run(str(self.bin / "python"), "-c", SCRIPT, cwd=self.folder).strip()


def run(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, cwd=cwd, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("installed"))


def test_wheel_has_the_dashboard(copy: Copy) -> None:
    folder = ROOT / "src" / "shoal" / "dashboard_files"
    files = {
        each.relative_to(folder.parent.parent).as_posix()
        for each in folder.rglob("*")
        if each.is_file()
    }

    with zipfile.ZipFile(copy.wheel) as opened:
        packed = {each for each in opened.namelist() if "/dashboard_files/" in each}

    assert packed == files
    assert "shoal/dashboard_files/index.html" in packed


def test_command_for_an_extra_works_as_printed(copy: Copy) -> None:
    command = copy.install_command()

    assert command.endswith(f"-m pip install '{copy.wheel}[joblib]'")
    assert "already satisfied: joblib" in run("sh", "-c", command, cwd=copy.folder)


def test_without_the_wheel_the_command_names_packages(copy: Copy) -> None:
    hidden = copy.wheel.rename(copy.wheel.with_suffix(".away"))
    try:
        command = copy.install_command()
    finally:
        hidden.rename(copy.wheel)

    assert command.endswith("-m pip install 'joblib>=1.4'")
    assert "already satisfied: joblib" in run("sh", "-c", command, cwd=copy.folder)
