"""Orders to load models, from a real coordinator to a real worker with llama.cpp."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from msgspec.structs import replace

from engines.outputs import TINY, chat_of
from harness.llama_cpp import llama_cpp
from models.hub_server import COMMIT, HubServer, serving
from shoal.app.server import run_coordinator
from shoal.cli.worker.join_library import WorkerLibrary, open_worker_library
from shoal.cli.worker.join_target import JoinTarget
from shoal.cli.worker.run_worker import JoinArguments, run_worker
from shoal.config import JoinConfig, ServeConfig
from shoal.config.loader import Size
from shoal.coordinator.hub import Hub
from shoal.domain.errors import ConfigError, JobError
from shoal.domain.ids import WorkerId
from shoal.domain.job import Job
from shoal.domain.work import Feature, HubModel, JobKind, ModelAction, ModelOrder, Work
from shoal.domain.worker import Hardware, ModelLibrary, Offer
from shoal.engines import gguf_files
from shoal.ledger.keys import Signer
from shoal.models.file_hashes import FileHashes
from shoal.models.library import Library
from shoal.models.library_server import LibraryServer
from shoal.models.model_hub import ModelHub
from shoal.protocols import discover

DAMAGED = TINY.read_bytes()[:-20_000]
LIBRARY = WorkerId("shoal:me/*models")


@dataclass
class Machine:
    """A worker that has joined a coordinator in this process."""

    hub: Hub
    url: str
    models: Path
    ended: "asyncio.Task[int]"
    stop: asyncio.Event

    @property
    def offers(self) -> Mapping[str, Offer]:
        return {
            name.removeprefix("shoal:me/"): worker.offer
            for name, worker in self.hub.pool.workers.items()
        }

    @property
    def library(self) -> ModelLibrary:
        found = self.offers["*models"].library
        assert found is not None
        return found

    async def run(self, work: Work) -> str:
        async with self.hub.run_job(Job(self.hub.new_id(), work)) as reader:
            return (await reader.outcome()).text

    async def order(self, action: ModelAction, name: str, **more: Any) -> None:
        await self.run(ModelOrder(action, name, LIBRARY, **more))

    async def load(self, name: str, **more: Any) -> None:
        await self.order(ModelAction.LOAD, name, **more)

    async def unload(self, name: str) -> None:
        await self.order(ModelAction.UNLOAD, name)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110  (nothing announces it)
        await asyncio.sleep(0.01)


def children() -> list[psutil.Process]:
    """Return the processes of embedded engines."""
    return [
        each
        for each in psutil.Process().children()
        if each.is_running() and "shoal.engines.llama_child" in each.cmdline()
    ]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data folder with its models, on a machine with no others."""
    for name in ("HOME", "USERPROFILE", "HF_HOME", "LLAMA_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(gguf_files, "DEMO_PACKAGE", "no_such_package")
    models = tmp_path / "worker" / "models"
    (models / "org" / "name").mkdir(parents=True)
    (models / "tiny.gguf").symlink_to(TINY)
    (models / "org" / "name" / "x.gguf").symlink_to(TINY)
    (models / "damaged.gguf").write_bytes(DAMAGED)
    (models / "cut.gguf").write_bytes(DAMAGED[:100])
    return tmp_path


@asynccontextmanager
async def joined(home: Path, *models: str, **options: Any) -> AsyncIterator[Machine]:
    settings = ServeConfig(
        port=0, data_dir=home / "data", join_token="", drain=0.0, no_discovery=True
    )
    config = JoinConfig(name="me", engine=("embedded",), **options)
    data = home / "worker"
    stop = asyncio.Event()
    async with run_coordinator(settings) as running:
        arguments = JoinArguments(running.url, models, config, data, None, as_json=True)
        worker = asyncio.create_task(run_worker(arguments, stop))
        machine = Machine(running.hub, running.url, data / "models", worker, stop)
        try:
            await until(lambda: worker.done() or machine.offers)
            yield machine
        finally:
            stop.set()
            await asyncio.gather(worker, return_exceptions=True)


async def test_model_is_loaded_on_order_and_unloaded(home: Path) -> None:
    async with joined(home, load="local", memory=Size(10**9)) as its:
        assert sorted(each.name for each in its.library.models) == [
            "damaged",
            "org/name",
            "tiny",
        ]
        assert its.library.memory == 10**9
        assert its.offers.keys() == {"*models"}, "nothing is loaded from the start"

        await its.load("tiny", context=512, slots=2)
        await its.load("org/name")
        offer = its.offers["tiny"]
        assert (offer.context, offer.slots) == (512, 2)
        assert len(children()) == 2
        assert await its.run(chat_of("ping")) == "pong"

        await its.unload("tiny")
        assert its.offers.keys() == {"*models", "org/name"}
        assert len(children()) == 1
    assert children() == []


async def test_library_says_what_a_loaded_model_offers(home: Path) -> None:
    async with joined(home, load="local") as its:
        listed = its.library.find("tiny")
        await its.load("tiny")
        offer = its.offers["tiny"]

    assert listed is not None
    assert listed.kinds == offer.kinds - {JobKind.TASK}
    assert listed.features == offer.features
    assert Feature.CONTINUE in listed.features
    assert listed.context == offer.context == 2048
    assert listed.size == TINY.stat().st_size
    assert listed.cache == 512
    assert listed.quantization == "F16"
    assert listed.engine == "embedded"


async def test_request_for_a_model_on_the_disk_loads_it(home: Path) -> None:
    async with joined(home, load="local") as its:
        assert await its.run(chat_of("ping")) == "pong"
        assert its.offers.keys() == {"*models", "tiny"}


async def test_failed_loads_say_why_and_leave_nothing(home: Path) -> None:
    async with joined(home, load="local") as its:
        with pytest.raises(
            JobError, match=r"damaged\.gguf cannot be loaded: .*corrupted"
        ):
            await its.load("damaged")
        assert children() == []

        loading = asyncio.create_task(its.load("tiny"))
        await until(children)
        children()[0].kill()
        with pytest.raises(JobError, match="ended by SIGKILL"):
            await loading
        assert its.offers.keys() == {"*models"}

        await its.load("tiny")
        assert its.offers.keys() == {"*models", "tiny"}


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
async def test_leaving_ends_a_load_that_is_stuck(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.engines.engine_child.EXIT_LIMIT", 0.05)
    async with joined(home, load="local") as its:
        loading = asyncio.create_task(its.load("tiny"))
        await until(children)
        children()[0].suspend()
        its.stop.set()

        assert await its.ended == 0
        assert children() == []
        loading.cancel()


async def test_named_model_stays_and_takes_its_memory(home: Path) -> None:
    async with joined(home, f"mine={TINY}", memory=Size(10**9)) as its:
        await until(lambda: its.offers.keys() == {"*models", "mine"})
        assert its.library.find("mine") is None
        need = int(TINY.stat().st_size * 1.1) + 512 * 2048 * 4
        assert its.library.memory == pytest.approx(10**9 - need, abs=1)

        with pytest.raises(JobError, match="mine stays loaded: its owner"):
            await its.unload("mine")
        await its.load("tiny")
        assert its.offers.keys() == {"*models", "mine", "tiny"}


async def test_chosen_model_may_be_unloaded(home: Path) -> None:
    (home / "worker" / "models" / "damaged.gguf").unlink()
    async with joined(home) as its:
        await until(lambda: len(its.offers) == 2)
        (name,) = its.offers.keys() - {"*models"}
        stays = {each.name: each.stays for each in its.library.models}
        assert stays == {"tiny": name == "tiny", name: True}

        await its.unload(name)
        assert its.offers.keys() == {"*models"}
        assert children() == []
        await its.load(name)
        assert its.offers.keys() == {"*models", name}


async def test_gpu_that_is_not_there_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.worker.run_worker.use_gpus", lambda numbers: None)
    config = JoinConfig(gpus=("7",))
    arguments = JoinArguments(
        "http://127.0.0.1:9", (), config, home, None, as_json=True
    )

    with pytest.raises(ConfigError, match="--gpus 7: this machine has no such GPU"):
        await run_worker(arguments, asyncio.Event())


async def test_load_none_offers_no_library(home: Path) -> None:
    async with joined(home, "tiny", load="none") as its:
        await until(lambda: its.offers)
        assert its.offers.keys() == {"tiny"}


async def test_model_is_copied_from_another_machine_and_loaded(home: Path) -> None:
    stop, other = asyncio.Event(), home / "other"
    async with joined(home, load="local") as its:
        config = JoinConfig(name="two", engine=("embedded",), load="pull")
        arguments = JoinArguments(its.url, (), config, other, None, as_json=True)
        worker = asyncio.create_task(run_worker(arguments, stop))
        machine = WorkerId("shoal:two/*models")
        await until(lambda: machine in its.hub.pool.workers)

        for name in ("../tiny", "no/model"):
            with pytest.raises(JobError, match=name):
                await its.run(ModelOrder(ModelAction.LOAD, name, machine))
        await its.run(ModelOrder(ModelAction.LOAD, "tiny", machine))

        assert "shoal:two/tiny" in its.hub.pool.workers
        copies = [*(other / "models").rglob("*.gguf")]
        assert [each.read_bytes() for each in copies] == [TINY.read_bytes()]
        stop.set()
        assert await worker == 0


def use_hub(monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> None:
    """Set the hub of this process, whose library has read HF_ENDPOINT already."""
    own = partial(ModelHub, hub.url)
    monkeypatch.setattr("shoal.models.model_hub.ModelHub", own)


HUB_FILES = {"tiny-Q8_0.gguf": TINY.read_bytes(), "bad-F16.gguf": DAMAGED}


async def test_model_that_no_machine_sends_comes_from_the_hub(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving(HubServer({"org/Tiny-GGUF": HUB_FILES})) as hub,
        joined(home, load="pull") as its,
    ):
        use_hub(monkeypatch, hub)
        monkeypatch.setenv("HF_TOKEN", "the owner's")
        await until(lambda: "*models" in its.offers)
        at = HubModel("org/Tiny-GGUF", "tiny-Q8_0.gguf", COMMIT)
        with pytest.raises(JobError, match="mine"):
            await its.load("mine")

        await its.load("mine", hub=at)

        assert "mine" in its.offers
        copy = its.models / "mine" / "tiny-Q8_0.gguf"
        assert copy.read_bytes() == TINY.read_bytes()
        assert {*hub.downloads} == {"tiny-Q8_0.gguf"}
        assert {*hub.revisions} == {COMMIT}
        assert hub.tokens == set()  # any machine can name a private model


async def test_what_the_hub_must_not_give_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving(HubServer({"org/Tiny-GGUF": HUB_FILES}, claimed_size=10**9)) as hub,
        joined(home, load="pull", memory=Size(10**6)) as its,
    ):
        use_hub(monkeypatch, hub)
        await until(lambda: "*models" in its.offers)
        at = HubModel("org/Tiny-GGUF", "tiny-Q8_0.gguf", COMMIT)
        for name, model, reason in (
            ("../x", at, "x"),
            ("x", replace(at, file="../x.gguf"), "is no GGUF file"),
            ("x", replace(at, repository="../.."), "is no GGUF file"),
            ("x", replace(at, revision="main"), "is no GGUF file"),
            ("x", replace(at, file="none.gguf"), "has no none.gguf"),
            ("x", replace(at, repository="org/none"), "has no model org/none"),
            ("x", at, "this machine lends 1 MB"),
        ):
            with pytest.raises(JobError, match=reason):
                await its.load(name, hub=model)

        assert hub.downloads == []
        assert not [*its.models.glob("x*")]


async def test_damaged_file_of_the_hub_is_not_loaded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving(HubServer({"org/Tiny-GGUF": HUB_FILES}, damaged=True)) as hub,
        joined(home, load="pull") as its,
    ):
        use_hub(monkeypatch, hub)
        await until(lambda: "*models" in its.offers)
        at = HubModel("org/Tiny-GGUF", "tiny-Q8_0.gguf", COMMIT)

        with pytest.raises(JobError, match="SHA-256"):
            await its.load("x", hub=at)

        assert not [*its.models.glob("x*")]


class OnceDamaged(HubServer):
    """Sends the beginning of a file right from the second time on."""

    async def file(self, request: web.Request) -> web.StreamResponse:
        sent = await HubServer.file(self, request)
        if request.headers.get("Range", "").startswith("bytes=0-"):
            self.damaged = False
        return sent


async def test_wrong_parts_of_a_shared_download_come_from_the_hub(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving(OnceDamaged({"org/Tiny-GGUF": HUB_FILES}, damaged=True)) as hub,
        joined(home, load="pull") as its,
    ):
        use_hub(monkeypatch, hub)
        await until(lambda: "*models" in its.offers)

        await its.load("x", hub=HubModel("org/Tiny-GGUF", "tiny-Q8_0.gguf", COMMIT))

        copy = its.models / "x" / "tiny-Q8_0.gguf"
        assert copy.read_bytes() == TINY.read_bytes()


async def test_library_follows_the_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.worker.model_orders.CHECK_INTERVAL", 0.01)
    async with joined(home, load="local") as its:
        (its.models / "new.gguf").symlink_to(TINY)
        await until(lambda: its.library.find("new"))
        await its.load("new")

        (its.models / "tiny.gguf").unlink()
        await until(lambda: its.library.find("tiny") is None)


async def library_of(
    home: Path,
    config: JoinConfig,
    wire: str = "shoal",
    shared: Library | None = None,
    signer: Signer | None = None,
) -> ModelLibrary | None:
    found = await opened_library(home, config, wire, shared, signer)
    return None if found is None else found.current


async def opened_library(
    home: Path,
    config: JoinConfig,
    wire: str = "shoal",
    shared: Library | None = None,
    signer: Signer | None = None,
) -> WorkerLibrary | None:
    return await open_worker_library(
        config,
        JoinTarget("http://host", discover()[wire], "", None),
        *(home / "worker", (), Hardware(bandwidth_gb=12.5)),
        LibraryServer(shared or Library({})),
        keeps=False,
        signer=signer,
    )


async def test_orders_need_a_wire_that_has_them(home: Path) -> None:
    with pytest.raises(ConfigError, match="dispatch has no orders to load models"):
        await library_of(home, JoinConfig(load="local"), "dispatch")

    assert await library_of(home, JoinConfig(), "dispatch") is None


async def test_worker_without_any_model_says_where_to_get_one(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for load, models in (("local", 3), ("pull", 0), ("", 0), ("local", 0)):
        if not models:
            shutil.rmtree(home / "worker", ignore_errors=True)
        assert "no model to load" not in caplog.text
        await library_of(home, JoinConfig(load=load))

    assert "`shoal models pull ORGANIZATION/NAME` gets one" in caplog.text


async def test_orders_need_the_embedded_engine(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)

    with pytest.raises(ConfigError, match=r"--load pull: .* not installed: .*\[llm\]"):
        await library_of(home, JoinConfig(load="pull"))
    assert await library_of(home, JoinConfig()) is None


async def test_most_of_the_free_memory_is_lent(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.worker.join_library.free_memory", lambda: 10**9)

    library = await library_of(home, JoinConfig(context=100, slots=3))

    assert library is not None
    assert replace(library, models=()) == ModelLibrary((), 900_000_000, 12.5, 100, 3)


@pytest.mark.parametrize(("load", "shared"), [("", 0), ("local", 3), ("pull", 3)])
async def test_files_are_shared_if_the_owner_asks_for_it(
    home: Path, load: str, shared: int
) -> None:
    library = Library({})

    found = await opened_library(home, JoinConfig(load=load), shared=library)

    assert found is not None
    assert len(found.shared_paths()) == len(library.names) == shared
    assert all(library.find(name) for name in library.names)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs Debian's llama.cpp")
async def test_model_that_may_be_split_has_the_address_of_its_copies(
    home: Path,
) -> None:
    config = JoinConfig(load="local", llama_cpp=str(llama_cpp()))
    signer, shared = Signer.from_seed(bytes(32)), Library({})

    unknown = await library_of(home, config, shared=shared, signer=signer)
    copied = await asyncio.to_thread(shared.find, "tiny")
    assert copied is not None
    address = FileHashes(home / "worker").manifest(copied).address
    known = await library_of(home, config, signer=signer)

    assert unknown is not None
    assert known is not None
    digests = {each.name: each.digest for each in known.models}
    assert {each.digest for each in unknown.models} == {""}
    assert digests["tiny"] == address
    assert digests["damaged"] == ""


def test_a_worker_starts_without_what_only_copies_need() -> None:
    script = "import sys, shoal.cli.worker.run_worker; sys.exit('numpy' in sys.modules)"

    subprocess.run([sys.executable, "-c", script], check=True)
