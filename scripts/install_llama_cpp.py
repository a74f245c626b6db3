"""Install llama.cpp's own programs, which distributions have only in later releases.

They come from the archive that this machine's apt uses, whose signatures apt checks as
ever, from a release of which this machine gets nothing else.  All goes into one folder,
with the libraries of that release beside: ``rpc-server`` and ``llama-server`` run by
its own dynamic linker.  A folder that has them stays as it is.

    python scripts/install_llama_cpp.py build/llama.cpp
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# Of each distribution: the suite, its components, and the keys that sign it.
KEYS = "/usr/share/keyrings/{}-archive-keyring.gpg"
SUITES = {"debian": ("sid", "main"), "ubuntu": ("devel", "main universe")}
PACKAGES = ("llama.cpp-tools", "llama.cpp-tools-extra", "libggml0-backend-rpc")
PROGRAMS = {
    "rpc-server": "usr/libexec/*/llama/bin/ggml-rpc-server",
    "llama-server": "usr/bin/llama-server",
}
LINKER = "usr/lib/*/ld-linux-*.so.*"
FORMAT = "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(ARCHITECTURE)"


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    if all((folder / name).exists() for name in PROGRAMS):
        return
    if shutil.which("apt-get") is None:
        sys.exit("no apt-get here: install llama.cpp's rpc-server and llama-server")
    shutil.rmtree(folder, ignore_errors=True)
    made = folder.with_name(folder.name + ".part")
    shutil.rmtree(made, ignore_errors=True)
    for package in download(made / "apt"):
        subprocess.run(["dpkg-deb", "-x", package, made / "root"], check=True)
    shutil.rmtree(made / "apt")
    made.rename(folder)
    write_programs(folder)


def download(state: Path) -> Iterator[Path]:
    """Download the packages with all that they need; yield their files."""
    for each in ("lists/partial", "archives/partial", "etc"):
        (state / each).mkdir(parents=True)
    (state / "status").touch()  # nothing is installed, so that nothing is left out
    (state / "etc/sources.list").write_text("".join(sources()))
    options = {
        "Dir::Etc": state / "etc",
        "Dir::Etc::SourceParts": os.devnull,
        "Dir::Etc::PreferencesParts": os.devnull,
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Debug::NoLocking": "true",
    }
    given = [f"-o{name}={value}" for name, value in options.items()]
    subprocess.run(["apt-get", "-qq", *given, "update"], check=True)
    subprocess.run(
        ["apt-get", "-qq", *given, "--yes", "--download-only", "install", *PACKAGES],
        check=True,
    )
    yield from sorted((state / "archives").glob("*.deb"))


def sources() -> Iterator[str]:
    """Yield this machine's own sources of its distribution, with the other suite."""
    system = platform.freedesktop_os_release()
    name, release = system["ID"], system.get("VERSION_CODENAME")
    if name not in SUITES:
        sys.exit(
            f"{name} may have llama.cpp's rpc-server and llama-server: install them"
        )
    other, components = SUITES[name]
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", FORMAT, "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = False
    for line in dict.fromkeys(targets.stdout.splitlines()):
        uri, suite, component, architecture = line.split("\t")
        if (suite, component) == (release, "main") and architecture != "all":
            found = True
            options = f"arch={architecture} signed-by={KEYS.format(name)}"
            yield f"deb [{options}] {uri} {other} {components}\n"
    if not found:
        sys.exit(f"apt has no source of {release} main, to find {other} beside it")


def write_programs(folder: Path) -> None:
    """Write programs that run those of the folder, which stays where it is."""
    root = folder / "root"
    linker = next(root.glob(LINKER))
    libraries = linker.parent
    # llama.cpp looks for its backends beside its program, which is the linker here.
    for backend in libraries.glob("ggml/backends*/*.so"):
        (libraries / backend.name).symlink_to(backend.relative_to(libraries))
    path = os.pathsep.join(map(str, (libraries, libraries / "llama")))
    for name, place in PROGRAMS.items():
        command = shlex.join(
            [str(linker), "--library-path", path, str(next(root.glob(place)))]
        )
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)


if __name__ == "__main__":
    main()
