"""`shoal models pull`, against a server that speaks the hub's API."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from harness.speed import PATIENCE
from live.programs import TINY, TOKEN, Programs
from models.hub_server import GATED, HubServer, serving
from shoal.engines.gguf_files import projector_of

TINY_GGUF = TINY.read_bytes()
FILES = {"README.md": b"# Tiny", "tiny-Q8_0.gguf": TINY_GGUF, "tiny-F16.gguf": b"GGUF?"}
REPOSITORY = "org/Tiny-GGUF"
# The library writes 10 MB at a time.
BIG, BIG_GGUF = "org/big", b"GGUF" + bytes(24 << 20)


SIZES = {"Q4_0": 1000, "Q8_0": 2000}
PROJECTORS = {"mmproj-F16.gguf": b"GGUF1", "mmproj-F32.gguf": b"GGUF22"}


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def stored(cache: Path) -> list[Path]:
    """Return the models in the hub's cache."""
    return [*cache.glob("**/*.gguf")]


def staged(cache: Path) -> list[Path]:
    """Return what is left of copies from the pool."""
    return [*cache.glob("hub/.shoal")]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    programs = Programs(tmp_path)
    try:
        yield programs
    finally:
        programs.close()


@pytest.fixture
async def hub() -> AsyncIterator[HubServer]:
    async with serving(
        HubServer(
            {REPOSITORY: FILES, "org/plain": {}, BIG: {"big-Q8_0.gguf": BIG_GGUF}}
        )
    ) as running:
        yield running


@pytest.fixture
def environment(hub: HubServer, tmp_path: Path) -> Mapping[str, str]:
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    return {**os.environ, **own, "SHOAL_DATA_DIR": str(tmp_path / "nothing")}


async def pull(
    environment: Mapping[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", "models", "pull", *arguments]
    return await asyncio.to_thread(
        subprocess.run,
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


async def test_the_fitting_file_is_downloaded_and_its_use_is_told(
    environment: Mapping[str, str],
) -> None:
    done = await pull(environment, REPOSITORY)

    path = done.stdout.strip()
    assert done.returncode == 0, done.stderr
    assert content(path) == TINY_GGUF
    assert path.endswith("/tiny-Q8_0.gguf")
    assert f"{REPOSITORY}, Q8_0, 2" in done.stderr
    assert f"to offer it: shoal join --model tiny={path}" in done.stderr


async def test_a_model_is_pulled_with_its_projector(
    hub: HubServer, environment: Mapping[str, str]
) -> None:
    eyes = {f"eyes-{each}.gguf": BIG_GGUF[:size] for each, size in SIZES.items()}
    hub.repositories = {**hub.repositories, "org/eyes": {**eyes, **PROJECTORS}}

    for quantization in SIZES:
        done = await pull(environment, f"org/eyes:{quantization}", "--no-peers")
        assert done.returncode == 0, done.stderr

        path = Path(done.stdout.strip())
        assert path.name == f"eyes-{quantization}.gguf"
        assert projector_of(path) == path.with_name("mmproj-F16.gguf")


@pytest.mark.long
async def test_a_download_that_was_cut_is_resumed(
    hub: HubServer, environment: Mapping[str, str]
) -> None:
    hub.cut_after = 12 << 20

    await pull(environment, BIG, "--json")
    done = await pull(environment, BIG, "--json")

    about = json.loads(done.stdout)
    assert content(about["path"]) == BIG_GGUF
    assert about["quantization"] == "Q8_0"
    assert hub.ranges
    assert all(int(each[6:-1]) > 0 for each in hub.ranges)


@pytest.mark.long
async def test_a_damaged_file_is_deleted(
    hub: HubServer, environment: Mapping[str, str], tmp_path: Path
) -> None:
    hub.damaged = True

    done = await pull(environment, REPOSITORY)

    assert done.returncode == 1
    assert "arrived damaged: its SHA-256 is" in done.stderr
    assert stored(tmp_path) == []
    hub.damaged = False
    assert (await pull(environment, REPOSITORY)).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tiny", "expected ORGANIZATION/NAME[:QUANTIZATION]; models with GGUF files"),
        (f"{REPOSITORY}:Q4_K_M", "no quantization Q4_K_M; there are: F16"),
        ("org/plain", "org/plain has no GGUF files"),
        ("org/none", "has no model org/none, or it is private: check the name"),
        (GATED, "org/gated is gated: accept its terms at http://127.0.0.1"),
    ],
)
async def test_a_wrong_name_is_refused_with_what_to_do(
    environment: Mapping[str, str], name: str, error: str
) -> None:
    done = await pull(environment, name)

    assert done.returncode == 1
    assert error in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "variables",
    [{"HF_ENDPOINT": "http://127.0.0.1:1"}, {"HF_HUB_OFFLINE": "1"}],
)
async def test_without_the_hub_other_ways_are_named(
    environment: Mapping[str, str], variables: Mapping[str, str]
) -> None:
    done = await pull({**environment, **variables}, REPOSITORY)

    assert done.returncode == 1
    assert "shoal models get NAME --from" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
async def test_a_folder_that_cannot_be_written_is_named(
    environment: Mapping[str, str], tmp_path: Path, variable: str
) -> None:
    file = tmp_path / "file"
    file.touch()

    done = await pull({**environment, variable: str(file / "hub")}, REPOSITORY)

    assert done.returncode == 1
    assert "Not a directory" in done.stderr
    assert "choose another folder: HF_HOME=FOLDER" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
async def test_machines_of_the_pool_are_asked_first(
    hub: HubServer,
    environment: Mapping[str, str],
    programs: Programs,
    tmp_path: Path,
) -> None:
    """Whatever the name of the model there, and only for the very same files."""
    other = tmp_path / "other.gguf"
    other.write_bytes(TINY_GGUF[:-1] + b"?")
    shared = (f"tiny-Q8_0={other}", f"tiny={TINY}")
    serve = [part for each in shared for part in ("--share", each)]
    pool = await asyncio.to_thread(programs.serve, *serve)
    source = ("--from", pool.url, "--token", TOKEN)

    done = await pull(environment, REPOSITORY, *source)

    assert done.returncode == 0, done.stderr
    assert content(done.stdout.strip()) == TINY_GGUF
    assert hub.downloads == []
    assert staged(tmp_path) == []
    # It is there by now, so nobody is asked.
    pool.program.kill()
    assert (await pull(environment, REPOSITORY, *source)).stdout == done.stdout
    # Nobody has this one.
    done = await pull(environment, f"{REPOSITORY}:F16", *source)
    assert content(done.stdout.strip()) == b"GGUF?"
    assert hub.downloads == ["tiny-F16.gguf"]


@pytest.mark.long
async def test_machines_that_pull_a_model_at_the_same_time_share_the_download(
    hub: HubServer,
    environment: Mapping[str, str],
    programs: Programs,
    tmp_path: Path,
) -> None:
    hub.seconds = 1.0
    pool = await asyncio.to_thread(programs.serve)
    source = ("--from", pool.url, "--token", TOKEN)
    homes = [tmp_path / name for name in ("one", "two", "three")]

    done = await asyncio.gather(
        *(pull({**environment, "HF_HOME": str(each)}, BIG, *source) for each in homes)
    )

    for home, each in zip(homes, done, strict=True):
        assert each.returncode == 0, each.stderr
        assert each.stdout.startswith(str(home))
        assert content(each.stdout.strip()) == BIG_GGUF
        assert staged(home) == []
    # One of them may have begun before the others.
    assert hub.sent < 2 * len(BIG_GGUF)


@pytest.mark.long
async def test_a_shared_download_goes_on_and_is_compared_with_the_hubs_hash(
    hub: HubServer, environment: Mapping[str, str], programs: Programs, tmp_path: Path
) -> None:
    pool = await asyncio.to_thread(programs.serve)
    source = ("--from", pool.url, "--token", TOKEN)
    hub.damaged = True
    done = await pull(environment, BIG, *source)
    assert "from the hub, since big-Q8_0.gguf arrived damaged" in done.stderr
    assert done.returncode == 1
    assert stored(tmp_path) == []

    hub.damaged = False
    hub.seconds = 0.3
    pulling = asyncio.create_task(pull(environment, BIG, *source))
    sent = hub.sent
    while hub.sent < sent + len(BIG_GGUF) // 3:  # noqa: ASYNC110  # no event
        await asyncio.sleep(0.05)
    hub.gone = True
    failed = await pulling
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    hub.gone, before = False, hub.sent
    done = await pull(environment, BIG, *source)
    assert content(done.stdout.strip()) == BIG_GGUF
    assert hub.sent - before < len(BIG_GGUF)
