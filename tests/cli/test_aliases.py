"""``shoal models alias``: what it prints."""

import asyncio
import json
from pathlib import Path

import pytest

from gateway.serving import KEY, serving
from shoal.cli.main import main


async def test_aliases_are_set_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path) as pool, pool.node():
        await pool.wait_joined()

        async def alias(*words: str) -> tuple[int, str, str]:
            address = ("--url", pool.url, "--api-key", KEY)
            status = await asyncio.to_thread(
                main, ["models", "alias", *words, *address]
            )
            return status, *capsys.readouterr()

        assert (await alias("ls"))[1].startswith("no aliases")
        made = await alias("set", "gpt-*", "absent, m1")
        idle = await alias("set", "org/gpt", "absent")
        bad = await alias("set", "gpt", "gpt")
        empty = await alias("set", "gpt", ",")
        listed = await alias("ls", "--json")
        table = await alias("ls")
        await alias("set", "gpt", "m1")
        folder = ("--in", str(tmp_path / "none"), "--url", pool.url, "--api-key", KEY)
        await asyncio.to_thread(main, ["models", "ls", *folder])
        models = capsys.readouterr().out
        removed = await alias("rm", "org/gpt")
        missing = await alias("rm", "gp-*")

    assert made[:2] == (0, "gpt-* stands for absent, m1: now m1\n")
    assert "no worker serves any of them now" in idle[1]
    assert bad[0] == 1
    assert "gpt: it cannot stand for itself" in bad[2]
    assert "at least one model" in empty[2]
    assert [each["name"] for each in json.loads(listed[1])["data"]] == [
        "gpt-*",
        "org/gpt",
    ]
    assert table[1].splitlines()[1].split() == ["gpt-*", "absent,", "m1", "m1"]
    assert "\ngpt (alias of m1) " in models
    assert removed[:2] == (0, "org/gpt stands for no model any more\n")
    assert missing[0] == 1
    assert "did you mean gpt-*" in missing[2]
