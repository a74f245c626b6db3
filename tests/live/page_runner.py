"""Runs the blocks of a page as a reader would: at terminals, one after another.

The shell and the programs are real; the home is a folder of the test.  What a page
cannot know is put in: the key, the token, the address, and a port that is free.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.documents import Block
from harness.ports import free_port
from live.programs import PATIENCE

SHELL = ("bash", "-euo", "pipefail", "-c")


class PageRunner:
    """A home with terminals; ``close`` ends what still runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "page"
        self.folder.mkdir(parents=True)
        self._port = free_port()
        self._job = ""  # the one that was submitted last
        self._running: list[subprocess.Popen[bytes]] = []
        self._programs = folder / "bin"
        self._environment = self._variables(folder / "home")
        self._write_programs()

    def run(self, block: Block) -> str:
        """Run a block, and return what it prints.

        A program with a file's name becomes that file; a block that goes on running is
        left to when it has printed that it is ready.
        """
        if block.file:
            (self.folder / block.file).write_text(self._filled(block))
            return ""
        if block.language == "python":
            return self._finish(block, [sys.executable, "-c", self._filled(block)])
        command = [*SHELL, self._filled(block)]
        if block.background:
            return self._start(block, command)
        return self._finish(block, command)

    def close(self) -> None:
        for process in self._running:
            process.terminate()
        for process in self._running:
            process.wait(PATIENCE)

    def _finish(self, block: Block, command: Sequence[str]) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=3 * PATIENCE,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{block.place}:\n{done.stdout}"
        if found := re.search(r'"job_id": ?"([^"]+)"', done.stdout):
            self._job = found[1]
        return done.stdout

    def _start(self, block: Block, command: Sequence[str]) -> str:
        log = self.folder / f"{block.page.stem}-{block.line}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._running.append(process)
        deadline = time.monotonic() + 2 * PATIENCE
        while block.background not in log.read_text():
            assert process.poll() is None, f"{block.place} ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"{block.place}:\n{log.read_text()}"
            time.sleep(0.05)
        return log.read_text()

    def _filled(self, block: Block) -> str:
        """Return a block with the values of this run."""
        data = Path(self._environment["HOME"]) / ".local" / "share" / "shoal"
        values = {
            "http://127.0.0.1:4010": f"http://127.0.0.1:{self._port}",
            "sk-shoal-…": _text_of(data / "api-key"),
        }
        self._environment["KEY"] = values["sk-shoal-…"]
        code = block.code
        if "https://192.168.1.10:4010 --token …" in code:
            line = self._shell("shoal join-line").splitlines()[0]
            _, _, url, _, token = line.split()[:5]
            values["https://192.168.1.10:4010 --token …"] = f"{url} --token {token}"
        for shown, value in values.items():
            code = code.replace(shown, value)
        return re.sub(r"(jobs/|export )(JOB|5f3c…)", rf"\g<1>{self._job}", code)

    def _shell(self, line: str) -> str:
        return subprocess.check_output(
            [*SHELL, line], cwd=self.folder, env=self._environment, text=True
        )

    def _variables(self, home: Path) -> dict[str, str]:
        home.mkdir()
        return {
            "HOME": str(home),
            "PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
            "SHOAL_PORT": str(self._port),
            "SHOAL_NO_DISCOVERY": "true",
            # Small models ramble: without this, for minutes on a busy machine.
            "SHOAL_CONTEXT": "1024",
            "URL": f"http://127.0.0.1:{self._port}",
            "TERM": "dumb",
            "LANG": "C.UTF-8",
        }

    def _write_programs(self) -> None:
        """Put this Python and its ``shoal`` first on the path."""
        self._programs.mkdir()
        for name, arguments in {
            "shoal": "-m shoal",
            "python": "",
            "python3": "",
        }.items():
            program = self._programs / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            program.chmod(0o755)


def _text_of(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""
