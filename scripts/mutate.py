"""Change a module in many small ways, and see whether its tests notice each.

    python scripts/mutate.py access ledger    (all groups: none)

``scripts/mutants.toml`` has the groups, and the mutants that behave as the original
does, each with the reason.  It ends with 1 if another mutant survives, or if one of
those is killed or is gone.

cosmic-ray and mutmut take out no statements and no guards, which tests miss most.
The one starts all tests anew for each mutant, and trials of the other hung here.
"""

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mutants import Key, Mutant, mutants_of

SOURCE = "src"
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", "*_cache", "__pycache__", ".hypothesis", "build", "dist"
)


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that keep one promise."""

    name: str
    modules: list[str]
    tests: list[str]


@dataclass(slots=True)
class Figures:
    """One line of the table."""

    name: str
    tried: int = 0
    of: int = 0
    killed: int = 0
    hung: int = 0
    equivalent: int = 0
    survived: int = 0
    seconds: float = 0.0

    HEAD = "group        of  tried  killed   hung  equivalent  survived  seconds"

    def __str__(self) -> str:
        return (
            f"{self.name:9} {self.of:5} {self.tried:6} {self.killed:7} {self.hung:6}"
            f" {self.equivalent:11} {self.survived:9} {self.seconds:8.0f}"
        )


def main() -> None:
    arguments = _arguments()
    root: Path = arguments.root.resolve()
    arguments.again = arguments.again and arguments.again.resolve()
    table = tomllib.loads((root / "scripts" / "mutants.toml").read_text())
    groups = [
        Group(name, _modules(root, each["modules"]), each["tests"])
        for name, each in table["groups"].items()
        if not arguments.groups or name in arguments.groups
    ]
    known = {
        (each["module"], each["function"], change)
        for each in table.get("equivalent", [])
        for change in each["changes"]
    }
    gone = _gone(root, known)
    print(*(f"GONE {each}" for each in gone), sep="\n", end="\n" * bool(gone))
    if arguments.check:
        sys.exit(bool(gone))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=LEFT_OUT)
        _enter(copy)
        figures = [_try_group(each, known, arguments) for each in groups]
        os.chdir(root)
    print(Figures.HEAD, *figures, sep="\n")
    sys.exit(bool(gone) or any(each.survived for each in figures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("groups", nargs="*")
    parser.add_argument("--only", default="", help="whose names this pattern finds")
    parser.add_argument("--again", type=Path, help="those that this output names")
    parser.add_argument("--sample", type=int, help="this many of each group")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--check", action="store_true", help="look for what is gone")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    return parser.parse_args()


def _modules(root: Path, patterns: Sequence[str]) -> list[str]:
    found = [
        sorted(path.relative_to(root).as_posix() for path in root.glob(pattern))
        for pattern in patterns
    ]
    if [] in found:
        sys.exit(f"no module is named {patterns[found.index([])]}")
    return [path for paths in found for path in paths if "__init__" not in path]


def _gone(root: Path, known: set[Key]) -> list[str]:
    """Return the known mutants that cannot be made any more."""
    left = {
        mutant.key
        for path in {path for path, _, _ in known}
        if (root / path).exists()
        for mutant in mutants_of(path, (root / path).read_bytes())
    }
    return [" ".join(key) for key in sorted(known - left)]


def _named_in(output: Path) -> set[Key]:
    """Return the mutants that survived in an earlier run, by what it printed."""
    named = re.findall(
        r"^(?:SURVIVED|UNREACHED|KILLED|HUNG) (.+?):\d+ (.*?): (.+)$",
        output.read_text(),
        re.MULTILINE,
    )
    return {(path, scope, change) for path, scope, change in named}


def _enter(copy: Path) -> None:
    """Have this process and those below it import from the copy."""
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy / SOURCE)
    sys.path[:0] = [str(copy / SOURCE), str(copy / "tests")]


def _try_group(group: Group, known: set[Key], arguments: argparse.Namespace) -> Figures:
    from mutant_trials import Verdict, reach_of, try_all

    began = time.monotonic()
    figures = Figures(group.name)
    again = _named_in(arguments.again) if arguments.again else None
    found = [
        mutant
        for path in group.modules
        for mutant in mutants_of(path, Path(path).read_bytes())
        if re.search(arguments.only, str(mutant))
        and (again is None or mutant.key in again)
    ]
    figures.of = len(found)
    if arguments.sample is not None and arguments.sample < len(found):
        chosen = random.Random(arguments.seed).sample(found, arguments.sample)
        found = [mutant for mutant in found if mutant in chosen]
    figures.tried = len(found)
    print(f"{group.name}: {len(found)} mutants", flush=True)
    reach = reach_of(group.modules, group.tests)
    if reach.failed:
        sys.exit(f"these fail unchanged: {', '.join(reach.failed)}")

    def told(mutant: Mutant, verdict: Verdict) -> None:
        survives = verdict in (Verdict.SURVIVED, Verdict.UNREACHED)
        figures.killed += verdict is Verdict.KILLED
        figures.hung += verdict is Verdict.HUNG
        figures.equivalent += survives and mutant.key in known
        if survives is not (mutant.key in known):
            figures.survived += 1
            print(f"{verdict.name} {mutant}", flush=True)

    for path in group.modules:
        if of_module := [mutant for mutant in found if mutant.path == path]:
            try_all(of_module, reach, SOURCE, told)
            print(f"  {path}: {len(of_module)} tried", flush=True)
    figures.seconds = time.monotonic() - began
    return figures


if __name__ == "__main__":
    main()
