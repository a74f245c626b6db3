"""What engines send, as the official clients' own streaming helpers read it."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from clients.conftest import INSTALLED
from gateway.chat.test_engines import CASES, Read, pool
from gateway.serving import KEY, Pool
from harness.speed import PATIENCE

__all__ = ["pool"]

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

HERE = Path(__file__).parent
PROGRAMS: dict[str, tuple[tuple[str, ...], Path]] = {
    "python": (("python", "-"), HERE / "read_streams.py"),
    "node": (("node", "--input-type=module", "-"), HERE / "node" / "read_streams.mjs"),
}
"""The programs that read streams, and what runs them as they come on standard input."""

WITHOUT_THOUGHTS = ("ai, openai chat",)
"""Clients that do not show the thoughts of a chat, which OpenAI's do not have."""


@pytest.mark.parametrize("language", PROGRAMS)
async def test_helpers_read_every_case(
    pool: Pool, language: str, tmp_path: Path
) -> None:
    (runner, *options), program = PROGRAMS[language]
    process = await asyncio.create_subprocess_exec(
        INSTALLED / "bin" / runner,
        *(*options, pool.url, KEY, json.dumps([*CASES])),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=INSTALLED,  # where Node looks for modules
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
    )
    async with asyncio.timeout(10 * PATIENCE):  # its modules are compiled first
        out, errors = await process.communicate(program.read_bytes())
    assert process.returncode == 0, errors.decode()

    found: dict[str, dict[str, Any]] = json.loads(out)
    for client, answers in found.items():
        assert answers.keys() == CASES.keys()
        for name, read in answers.items():
            check(client, name, read, CASES[name].read)


def check(client: str, name: str, read: dict[str, Any], expected: Read) -> None:
    """Compare what a client has read with what a case says."""
    what = f"{client}: {name}: {read}"
    if expected.error:
        assert expected.error in read["error"], what
        return
    assert read["error"] == "", what
    assert read["text"] == expected.text, what
    assert [tuple(call) for call in read["calls"]] == [*expected.calls], what
    if client not in WITHOUT_THOUGHTS:
        assert read["thoughts"] == expected.thoughts, what
