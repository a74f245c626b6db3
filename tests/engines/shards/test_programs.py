"""llama.cpp's own programs: how they are found, and what is said if they are not."""

import os
import sys
from pathlib import Path

import pytest

from engines.shards.conftest import write_program
from shoal.domain.errors import ConfigError
from shoal.engines.shards.programs import find_programs, program_environment

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")


async def test_programs_of_a_folder_are_described(fakes: Path) -> None:
    lender = await find_programs(fakes)
    write_program(fakes / "llama-server", "exit 0")
    runner = await find_programs(fakes)

    assert lender is not None
    assert (lender.rpc_server, lender.llama_server) == (fakes / "rpc-server", None)
    assert (lender.protocol, lender.device) == ("ggml-rpc 8.0.0", "CPU")
    assert runner is not None
    assert runner.llama_server == fakes / "llama-server"


async def test_programs_on_the_path_have_either_name(
    fakes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fakes / "rpc-server").rename(fakes / "ggml-rpc-server")
    monkeypatch.setenv("PATH", str(fakes), prepend=os.pathsep)

    found = await find_programs()

    assert found is not None
    assert found.rpc_server == fakes / "ggml-rpc-server"


async def test_folder_without_the_programs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"has no rpc-server or ggml-rpc-server\. Giv"
    ):
        await find_programs(tmp_path)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("echo no library >&2; exit 127", "no library"),
        ("exit 0", "it printed nothing"),
        ("echo Starting RPC server", "Starting RPC server"),
    ],
)
async def test_program_that_does_not_start_says_why(
    tmp_path: Path, command: str, reason: str
) -> None:
    write_program(tmp_path / "rpc-server", command)

    with pytest.raises(ConfigError, match=f"does not start, or has no.*: {reason}"):
        await find_programs(tmp_path)


def test_programs_get_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")

    environment = program_environment(HOME="here")

    assert "SHOAL_TOKEN" not in environment
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["HOME"] == "here"
