"""Check what a release would publish: the files of both archives, and a fresh install.

The source archive has the tracked files and nothing else; the wheel has those of the
package.  Then the wheel is installed into a new environment, in a scratch folder, and
used as its first user would: each command and each exported name, on the dependencies
that it declares.

    python scripts/check_dist.py dist
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/shoal/"
METADATA = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")
OPTIONAL = {"register_joblib", "train"}  # names that need an extra

USE = f"""
import shoal
from shoal.cli.main import PLACES

for name in set(shoal.__all__) - {OPTIONAL!r}:
    getattr(shoal, name)
print(*PLACES)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder with one sdist and one wheel")
    folder: Path = parser.parse_args().folder.resolve()
    source, wheel = _only(folder, "*.tar.gz"), _only(folder, "*.whl")
    tracked = set(_run("git", "ls-files", cwd=ROOT).splitlines())
    _same(source, _in_source(source), tracked | {"PKG-INFO"})
    _same(wheel, _in_wheel(wheel), _expected_in_wheel(wheel, tracked))
    with tempfile.TemporaryDirectory(prefix="shoal-dist-") as scratch:
        _try(wheel, Path(scratch))


def _only(folder: Path, pattern: str) -> Path:
    found = [*folder.glob(pattern)]
    if len(found) != 1:
        sys.exit(f"{folder}: expected one {pattern}, found {len(found)}")
    return found[0]


def _in_source(archive: Path) -> set[str]:
    top = archive.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(archive) as opened:
        return {each.name.removeprefix(top) for each in opened if not each.isdir()}


def _in_wheel(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as opened:
        return {*opened.namelist()}


def _expected_in_wheel(archive: Path, tracked: set[str]) -> set[str]:
    package = {each for each in tracked if each.startswith(PACKAGE)}
    if PACKAGE + "py.typed" not in package:
        sys.exit(f"{PACKAGE}py.typed is not tracked: type checkers would see no types")
    information = f"shoal-{_version(archive)}.dist-info"
    return {
        *(f"shoal/{each.removeprefix(PACKAGE)}" for each in package),
        *(f"{information}/{each}" for each in METADATA),
    }


def _same(archive: Path, files: set[str], expected: set[str]) -> None:
    """Exit with the files that an archive lacks or has beyond what is expected."""
    lines = [
        *(f"  lacks {name}" for name in sorted(expected - files)),
        *(f"  has {name}, which is not tracked" for name in sorted(files - expected)),
    ]
    if lines:
        sys.exit("\n".join([f"{archive.name}:", *lines]))
    print(f"{archive.name}: {len(files)} files")


def _try(wheel: Path, scratch: Path) -> None:
    """Install the wheel into a new environment and use it."""
    venv.create(scratch / "venv", with_pip=True)
    programs = scratch / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python, shoal = str(programs / "python"), str(programs / "shoal")
    _run(python, "-m", "pip", "install", "--quiet", str(wheel), cwd=scratch)
    _run(python, "-m", "pip", "check", cwd=scratch)
    installed = json.loads(_run(shoal, "version", "--json", cwd=scratch))["shoal"]
    if installed != _version(wheel):
        sys.exit(f"{wheel.name}: `shoal version` says {installed}")
    commands = _run(python, "-c", USE, cwd=scratch).split()
    for command in commands:
        _run(shoal, command, "--help", cwd=scratch)
    print(f"{wheel.name}: installed; {len(commands)} commands start")


def _version(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def _run(*command: str, cwd: Path) -> str:
    """Return what a command prints; exit with its errors if it fails."""
    # Nothing of this checkout, which the programs would otherwise import.
    outside = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=outside, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
