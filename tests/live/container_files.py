"""What the Dockerfile and compose.yaml say, run without a container engine."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
INSTALLED = "/opt/shoal"
DATA = "/data"
SECRETS = "/run/secrets"


def instructions() -> list[tuple[str, str]]:
    """Return the name and the rest of each instruction of the Dockerfile."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", text)
    pairs = (line.partition(" ") for line in joined.splitlines() if line)
    return [(name, rest.strip()) for name, _, rest in pairs]


def instruction(name: str) -> str:
    """Return the rest of the last instruction with a name."""
    return [rest for each, rest in instructions() if each == name][-1]


def compose(file: str = "compose.yaml") -> Any:
    return yaml.safe_load((ROOT / file).read_text())


class Image:
    """What the Dockerfile installs, in a folder."""

    def __init__(self, folder: Path, **arguments: str) -> None:
        """Run its first stage, in a folder with what it copies and nothing else.

        ``arguments`` are in place of those of the Dockerfile.
        """
        self.arguments = arguments
        self._installed = folder / "shoal"
        build = folder / "build"
        build.mkdir()
        rest = dict[str, str](
            each.split("=", 1) for name, each in instructions() if name == "ARG"
        )
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        # Compiling all that is installed takes longer than what is imported of it.  The
        # variable is the value of ``compile``, whatever its name says.
        assert arguments.keys() <= rest.keys()
        environment = {**os.environ, **rest, **arguments}
        environment |= {"PATH": path, "PIP_NO_COMPILE": "0"}
        environment.pop("PYTHONPATH", None)
        for name, given in instructions()[1:]:
            if name == "FROM":
                break
            if name == "COPY":
                *sources, target = given.split()
                for source in sources:
                    _copy(ROOT / source, build / target)
            if name == "RUN":
                command = given.replace(INSTALLED, str(self._installed))
                subprocess.run(
                    command, shell=True, check=True, cwd=build, env=environment
                )

    def environment(self, data: Path, **others: str) -> Mapping[str, str]:
        """Return the variables of a container with a volume."""
        pairs = re.findall(r"(\w+)=(\S+)", instruction("ENV"))
        found = {
            name: value.replace(DATA, str(data))
            .replace(INSTALLED, str(self._installed))
            .replace("$PATH", os.environ["PATH"])
            for name, value in pairs
        }
        return {"HOME": str(data.parent), **found, **others}

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> "subprocess.Popen[bytes]":
        """Start the entry point with a command."""
        words = [*json.loads(instruction("ENTRYPOINT")), *command]
        with log.open("wb") as output:
            return subprocess.Popen(
                words, env=environment, stdout=output, stderr=output
            )

    def healthy(self, environment: Mapping[str, str]) -> bool:
        """Run the health check once."""
        words = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
        done = subprocess.run(words, env=environment, capture_output=True, check=False)
        return done.returncode == 0


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
