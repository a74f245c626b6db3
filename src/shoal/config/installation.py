"""How this copy of Shoal was installed, and so how more is installed beside it.

Messages must name commands that work where they are read: an index may not have Shoal,
or another version, and pip does not reach into the environments of pipx and uv.
"""

import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME = "shoal"  # of the distribution

_SAFE = re.compile(r"[\w@%+=:,./\\-]+", re.ASCII)  # needs no quotes
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([^"']+)["']""")


class Installer(Enum):
    """What manages the environment."""

    PIP = "pip"
    PIPX = "pipx"
    UV = "uv pip"
    UV_TOOL = "uv tool"


@dataclass(frozen=True, slots=True)
class Installation:
    """A copy of Shoal in an environment.

    ``origin`` is the folder, file or URL that it was installed from; empty: an index.
    ``requirements`` are those of the distribution, as its metadata has them.
    ``extras`` and ``with_packages`` were requested from `uv tool` as well; it removes
    them if they are not named again.
    """

    installer: Installer
    prefix: Path
    executable: str
    origin: str = ""
    editable: bool = False
    requirements: Sequence[str] = ()
    extras: Sequence[str] = ()
    with_packages: Sequence[str] = ()

    def add_extra(self, extra: str) -> str:
        """Return the command that installs an extra."""
        if self.origin and self.installer is Installer.UV_TOOL:
            beside = [word for each in self.with_packages for word in ("--with", each)]
            source = self._source(dict.fromkeys([*self.extras, extra]))
            return _command(["uv", "tool", "install", *beside, *source])
        if self.origin and self.installer is not Installer.PIPX:
            return _command([*self._install(), *self._source([extra])])
        if needed := self.needed_by(extra):
            return self.add_packages(*needed)
        return f"install the packages of Shoal's extra {extra}"

    def add_packages(
        self, *packages: str, alone: bool = False, again: bool = False
    ) -> str:
        """Return the command that installs packages, which an index has.

        ``alone``: without what they require; ``again``: also if they are installed.
        """
        flags = ["--no-deps"] if alone else []
        if self.installer is Installer.PIPX and not (alone or again):
            return _command(["pipx", "inject", self.prefix.name, *packages])
        if again:
            uv = self.installer in (Installer.UV, Installer.UV_TOOL)
            flags.append("--reinstall" if uv else "--force-reinstall")
        return _command([*self._install(), *flags, *packages])

    def same_elsewhere(self, version: str) -> str:
        """Describe how another machine gets the same version."""
        if "://" in self.origin:
            return _command(["pip", "install", *self._source([])])
        copied = f", from a copy of {self.origin}" if self.origin else ""
        return f"Shoal {version}{copied}"

    def needed_by(self, extra: str) -> Sequence[str]:
        """Return the packages of an extra."""
        return [
            each.partition(";")[0].strip()
            for each in self.requirements
            if extra in _EXTRA.findall(each.partition(";")[2])
        ]

    def _install(self) -> Sequence[str]:
        match self.installer:
            case Installer.PIPX:
                return ["pipx", "runpip", self.prefix.name, "install"]
            case Installer.UV | Installer.UV_TOOL:
                return ["uv", "pip", "install", "--python", str(self.prefix)]
            case Installer.PIP:
                return [*self._pip(), "install"]

    def _pip(self) -> Sequence[str]:
        """Return pip of this environment, by its name if that means it."""
        found = shutil.which("pip")
        here = found is not None and Path(found).parent == Path(self.executable).parent
        return ["pip"] if here else [self.executable, "-m", "pip"]

    def _source(self, extras: Iterable[str]) -> Sequence[str]:
        """Return what is installed, with extras, as pip and uv take it."""
        named = ",".join(extras)
        suffix = f"[{named}]" if named else ""
        if "://" in self.origin:
            return [f"{NAME}{suffix} @ {self.origin}"]
        return [*(["-e"] if self.editable else []), f"{self.origin}{suffix}"]


def install_extra(extra: str) -> str:
    """Return the command that adds an extra to this copy of Shoal."""
    return this_installation().add_extra(extra)


def this_installation() -> Installation:
    """Return how this copy of Shoal is installed."""
    try:
        found = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:  # as in a checkout on PYTHONPATH
        folder = Path(__file__).parents[3]
        origin = str(folder) if (folder / "pyproject.toml").exists() else ""
        return Installation(
            Installer.PIP, Path(sys.prefix), sys.executable, origin, editable=True
        )
    return installation_of(found, Path(sys.prefix), sys.executable)


def installation_of(
    distribution: metadata.Distribution, prefix: Path, executable: str
) -> Installation:
    """Return how a distribution is installed in the environment ``prefix``."""
    origin, editable = _origin(distribution.read_text("direct_url.json") or "{}")
    requirements = distribution.requires or []
    receipt = prefix / "uv-receipt.toml"
    if receipt.exists():
        requested = _asked_of_uv(receipt)
        return Installation(
            Installer.UV_TOOL,
            prefix,
            executable,
            origin,
            editable,
            requirements,
            requested.pop(NAME, []),
            [each for named in requested.values() for each in named],
        )
    installer = Installer.PIP
    if (prefix / "pipx_metadata.json").exists():
        installer = Installer.PIPX
    elif (distribution.read_text("INSTALLER") or "").strip() == "uv":
        installer = Installer.UV
    return Installation(installer, prefix, executable, origin, editable, requirements)


def _origin(direct_url: str) -> tuple[str, bool]:
    """Return what PEP 610's ``direct_url.json`` names, and whether it is editable.

    The first one is empty if there is none, or if it is a file that is gone.
    """
    about: Mapping[str, Any] = json.loads(direct_url)
    url = about.get("url", "")
    if "vcs_info" in about:
        vcs = about["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    if about.get("subdirectory"):
        return f"{url}#subdirectory={about['subdirectory']}", False
    if not url.startswith("file:"):
        return url, False
    path = Path(url2pathname(urlsplit(url).path))
    editable = bool(about.get("dir_info", {}).get("editable"))
    return (str(path) if path.exists() else ""), editable


def _asked_of_uv(receipt: Path) -> dict[str, list[str]]:
    """Return the packages that `uv tool` was asked for, by name.

    For Shoal itself, it is the extras.
    """
    requested: dict[str, list[str]] = {}
    # The format is uv's own, and may change.
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        for each in tomllib.loads(receipt.read_text())["tool"]["requirements"]:
            extras = each.get("extras", [])
            place = each.get("directory") or each.get("path") or each.get("url")
            suffix = f"[{','.join(extras)}]" if extras else ""
            version = each.get("specifier", "")
            requested[each["name"]] = [place or f"{each['name']}{suffix}{version}"]
            if each["name"] == NAME:
                requested[NAME] = extras
    return requested


def _command(words: Sequence[str]) -> str:
    """Return a command line with quotes where the system's shell needs them."""
    if sys.platform != "win32":
        return shlex.join(words)
    return " ".join(each if _SAFE.fullmatch(each) else f'"{each}"' for each in words)
