"""Models that are loaded for the jobs that wait for them."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from coordinator.hubs import (
    EVERYTHING,
    Client,
    Coordinator,
    ScriptedWorker,
    SlowStore,
    run_pending,
    run_script,
)
from shoal.coordinator.hub import Hub
from shoal.coordinator.placer import (
    INTERVAL,
    LOOK_EVERY,
    UNPLACED_AFTER,
    Placer,
    local_time,
)
from shoal.domain.errors import (
    CannotDo,
    Forbidden,
    ModelLoading,
    NoWorker,
    UnknownModel,
)
from shoal.domain.facts import DeploymentSet
from shoal.domain.job import TimeLimits
from shoal.domain.vocabulary import (
    CallProgress,
    Completed,
    Failed,
    Joined,
    LoadChanged,
)
from shoal.domain.work import ANY_MODEL, HubModel, JobKind, ModelAction, ModelOrder
from shoal.domain.worker import LoadableModel, ModelLibrary, Offer, WorkerLoad
from shoal.pool.inputs import DeploymentOrder
from shoal.pool.models.machine import PlacementRules
from shoal.pool.models.orders import FAILURE_PAUSE
from shoal.transports.clock import LoopClock
from simulation.virtual import scripted

GB = 10**9
PATIENT = TimeLimits(queue=3600.0)
QWEN = LoadableModel("qwen3", 2 * GB, context=8192, cache=1000)
LLAMA = LoadableModel("llama", 3 * GB, context=8192, cache=1000)


class ScriptedMachine(ScriptedWorker):
    """A machine with a library; the test says when it has carried out an order."""

    def __init__(
        self,
        hub: Hub,
        name: str,
        *models: LoadableModel,
        memory: int = 8 * GB,
        only_for: frozenset[str] = frozenset(),
        fetches: bool = False,
    ) -> None:
        self.name = name
        self.hub = hub
        self.accepts = EVERYTHING
        self.commands = []
        self.disconnections = []
        self.loaded: dict[str, ScriptedWorker] = {}
        self.port = hub.connect(self, "wire")
        kinds = frozenset({JobKind.MODEL})
        library = ModelLibrary(models, memory, context=4096, fetches=fetches)
        offer = Offer(kinds, slots=2, only_for=only_for, library=library)
        self.emit(Joined(f"{name}/*models", offer))

    @property
    def orders(self) -> list[ModelOrder]:
        return [each.work for each in self.runs if isinstance(each.work, ModelOrder)]

    def progress(self, share: float | None, step: str = "", run: int = -1) -> None:
        job = self.runs[run]
        self.emit(CallProgress(job.job_id, job.lease, share, step))

    def carry_out(self, run: int = -1) -> None:
        """Load or unload the model of an order, and say so."""
        job = self.runs[run]
        assert isinstance(job.work, ModelOrder)
        model = job.work.name
        if job.work.action is ModelAction.LOAD:
            worker = ScriptedWorker(self.hub, f"{self.name}/{model}", model, slots=4)
            self.loaded[model] = worker
        else:
            self.loaded.pop(model).port.on_disconnect("unloaded")
        self.emit(Completed(job.job_id, job.lease))

    def fail(self, error: str, run: int = -1) -> None:
        job = self.runs[run]
        self.emit(Failed(job.job_id, job.lease, error))


async def pause() -> None:
    """Let the coordinator decide what is loaded."""
    await asyncio.sleep(0.2)
    await run_pending()


def run_placing(script: Callable[[Coordinator], Awaitable[None]]) -> None:
    """Run a script against a coordinator that decides what is loaded."""

    async def with_placer(coordinator: Coordinator) -> None:
        Placer(coordinator.hub, LoopClock())
        await script(coordinator)

    run_script(with_placer)


@scripted(run_placing)
async def test_a_request_has_its_model_loaded_and_is_answered(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
    await run_pending()

    client = await coordinator.request("qwen3")
    await pause()

    assert anna.orders == [ModelOrder(ModelAction.LOAD, "qwen3", "wire:anna/*models")]
    anna.carry_out()
    await pause()
    anna.loaded["qwen3"].answer("hello")
    await run_pending()
    assert client.outcome is not None
    assert client.outcome.output == "hello"
    assert not coordinator.hub.pool.jobs


@scripted(run_placing)
async def test_a_request_for_any_model_has_the_largest_that_fits_loaded(
    coordinator: Coordinator,
) -> None:
    vectors = structs.replace(
        LLAMA, name="vectors", kinds=frozenset({JobKind.EMBEDDING})
    )
    huge = structs.replace(LLAMA, name="huge", size=9 * GB)
    models = (QWEN, LLAMA, vectors, huge)
    anna = ScriptedMachine(coordinator.hub, "anna", *models)
    await run_pending()

    client = await coordinator.request(ANY_MODEL)
    await pause()
    assert [each.name for each in anna.orders] == ["llama"]
    anna.fail("it is damaged")
    await pause()
    assert [each.name for each in anna.orders] == ["llama", "qwen3"]
    anna.carry_out()
    await pause()
    anna.loaded["qwen3"].answer("hello")
    await run_pending()

    assert client.outcome is not None
    assert client.outcome.output == "hello"


@scripted(run_placing)
async def test_a_request_for_any_model_waits_for_a_long_load(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
    await run_pending()
    limits = TimeLimits(queue=600.0, without_worker=30.0)

    client = await coordinator.request(ANY_MODEL, limits)
    for share in range(1, 5):
        await asyncio.sleep(30.0)
        anna.progress(share / 5)
    assert client.error is None
    anna.fail("out of memory")
    await asyncio.sleep(40.0)

    assert isinstance(client.error, NoWorker)


def test_a_thousand_requests_cause_one_load() -> None:
    async def script(coordinator: Coordinator) -> None:
        Placer(coordinator.hub, LoopClock())
        machines = [
            ScriptedMachine(coordinator.hub, name, QWEN) for name in ("anna", "ben")
        ]
        await run_pending()
        clients = [
            Client(coordinator.hub, coordinator.job("qwen3")) for _ in range(999)
        ]
        await pause()
        await asyncio.sleep(20.0)
        clients.append(Client(coordinator.hub, coordinator.job("qwen3")))
        await pause()

        assert sum(len(each.orders) for each in machines) == 1
        assert [each.error for each in clients] == [None] * 1000

    run_script(script, queue_max=2000)


@scripted(run_placing)
async def test_a_client_is_told_how_far_the_load_is(coordinator: Coordinator) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
    await run_pending()
    client = await coordinator.request("qwen3")
    await pause()
    await asyncio.sleep(3.0)
    anna.progress(0.25, "reading weights")

    said = coordinator.hub.waits_for(client.job_id)

    assert said == "qwen3 is being loaded on wire:anna (25%, reading weights)"


@pytest.mark.parametrize("offers", [False, True])
def test_a_machine_that_keeps_no_model_is_asked_less_and_less(offers: bool) -> None:
    async def script(coordinator: Coordinator) -> None:
        Placer(coordinator.hub, LoopClock())
        anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
        await run_pending()
        client = await coordinator.request("qwen3", PATIENT)
        answered = 0
        for _ in range(600):
            await asyncio.sleep(0.1)
            if client.error is not None:  # it lost too many workers
                client = await coordinator.request("qwen3", PATIENT)
            if len(anna.runs) > answered and offers:
                anna.carry_out()
                await run_pending()
                anna.loaded.pop("qwen3").port.on_disconnect("changed its mind")
            elif len(anna.runs) > answered:
                anna.emit(Completed(anna.runs[-1].job_id, anna.runs[-1].lease))
            answered = len(anna.runs)

        assert 3 <= len(anna.orders) <= 5

    run_script(script)


@scripted(run_placing)
async def test_a_machine_that_lost_a_model_is_asked_again_at_once(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
    await run_pending()
    for number in range(1, 5):
        client = await coordinator.request("qwen3", PATIENT)
        await pause()
        assert len(anna.orders) == number
        anna.carry_out()
        await pause()
        anna.loaded["qwen3"].answer("hello")
        await asyncio.sleep(60.0)
        assert client.outcome is not None
        anna.loaded.pop("qwen3").port.on_disconnect("crashed")


@scripted(run_placing)
async def test_a_request_waits_for_a_machine_that_left_a_moment_ago(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
    await run_pending()
    anna.port.on_disconnect("reset")
    await run_pending()

    client = await coordinator.request("qwen3")
    await pause()
    again = ScriptedMachine(coordinator.hub, "anna", QWEN)
    await pause()

    assert client.error is None
    assert [each.name for each in again.orders] == ["qwen3"]


@pytest.mark.parametrize(
    "share", [math.nan, math.inf, -math.inf, -0.5, 1e308, 5e-324, 1e-300]
)
def test_odd_progress_of_a_machine_harms_nobody(share: float) -> None:
    async def script(coordinator: Coordinator) -> None:
        Placer(coordinator.hub, LoopClock())
        anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
        await run_pending()
        client = await coordinator.request("qwen3", TimeLimits(queue=10.0))
        await pause()
        await asyncio.sleep(5.0)
        anna.progress(share, "x" * 1_000_000)

        said = coordinator.hub.waits_for(client.job_id)
        await asyncio.sleep(6.0)

        assert said is not None
        assert len(said) < 300
        assert isinstance(client.error, ModelLoading)
        assert 1 <= client.error.retry_after <= 60
        assert len(str(client.error)) < 400
        seconds = client.error.loading["seconds"]
        assert seconds is None or (
            isinstance(seconds, float) and math.isfinite(seconds)
        )

    run_script(script)


@scripted(run_placing)
async def test_a_client_that_waits_no_longer_learns_when_to_come_back(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
    await run_pending()
    client = await coordinator.request("qwen3", TimeLimits(queue=10.0))
    await pause()
    await asyncio.sleep(5.0)
    anna.progress(0.25, "reading weights")

    await asyncio.sleep(6.0)

    assert isinstance(client.error, ModelLoading)
    assert "qwen3 is being loaded on wire:anna (25%, reading weights)" in str(
        client.error
    )
    loading = dict(client.error.loading)
    assert loading.pop("seconds") == pytest.approx(29.4, abs=1)
    assert 28 <= client.error.retry_after <= 31
    assert loading == {
        "model": "qwen3",
        "machine": "wire:anna",
        "step": "reading weights",
        "bytes": GB // 2,
        "size": 2 * GB,
    }
    assert len(coordinator.hub.pool.model_orders) == 1  # which goes on


@scripted(run_placing)
async def test_a_client_learns_that_the_only_machine_is_paused(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
    anna.emit(LoadChanged(WorkerLoad("is paused")))
    await run_pending()
    client = await coordinator.request("qwen3", TimeLimits(queue=10.0))

    await asyncio.sleep(11.0)

    assert "no machine loads qwen3 now: wire:anna is paused" in str(client.error)


@scripted(run_placing)
async def test_a_request_waits_for_the_model_in_the_way_to_be_unloaded(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN, LLAMA, memory=5 * GB)
    await run_pending()
    await coordinator.request("qwen3", PATIENT)
    await pause()
    anna.carry_out()
    await pause()
    anna.loaded["qwen3"].answer("hello")

    client = await coordinator.request("llama", PATIENT)
    await asyncio.sleep(UNPLACED_AFTER + 2 * INTERVAL)

    assert anna.orders[1:] == [
        ModelOrder(ModelAction.UNLOAD, "qwen3", "wire:anna/*models", room_for="llama")
    ]
    assert client.error is None
    anna.carry_out()
    await asyncio.sleep(3.0)
    anna.carry_out()
    await pause()
    anna.loaded["llama"].answer("hello")
    await run_pending()
    assert client.outcome is not None


@scripted(run_placing)
async def test_two_models_that_do_not_both_fit_take_turns(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN, LLAMA, memory=5 * GB)
    await run_pending()
    clients = [
        await coordinator.request(model, PATIENT) for model in ("qwen3", "llama")
    ]
    await pause()
    first = anna.orders[0].name
    await asyncio.sleep(25.0)
    anna.carry_out()  # to load the first
    await pause()
    anna.loaded[first].answer("hello")
    await asyncio.sleep(PlacementRules().stays + 2 * INTERVAL)
    anna.carry_out()  # to unload it
    await asyncio.sleep(3.0)
    anna.carry_out()  # to load the second
    await pause()
    (second,) = anna.loaded
    anna.loaded[second].answer("hello")
    await run_pending()

    assert [each.error for each in clients] == [None, None]
    assert {first, second} == {"qwen3", "llama"}


@scripted(run_placing)
async def test_a_load_that_makes_no_progress_is_given_up(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
    ben = ScriptedMachine(coordinator.hub, "ben", QWEN)
    await run_pending()
    client = await coordinator.request("qwen3", PATIENT)
    await pause()
    stuck, other = (anna, ben) if anna.orders else (ben, anna)
    for _ in range(10):
        await asyncio.sleep(60.0)
        stuck.progress(0.5)
    assert not other.orders

    await asyncio.sleep(130.0)

    assert stuck.cancelled == [stuck.runs[0].job_id]
    assert other.orders
    other.carry_out()
    await pause()
    assert client.error is None
    assert other.loaded["qwen3"].runs


@scripted(run_placing)
async def test_the_next_machine_loads_what_one_could_not(
    coordinator: Coordinator,
) -> None:
    machines = [
        ScriptedMachine(coordinator.hub, name, QWEN) for name in ("anna", "ben")
    ]
    await run_pending()
    client = await coordinator.request("qwen3")
    await pause()
    (first,) = [each for each in machines if each.orders]
    (second,) = [each for each in machines if not each.orders]

    first.fail("out of memory: 2.1 GB at layer 30")
    await pause()

    assert second.orders
    second.fail("the file is damaged")
    await pause()
    assert isinstance(client.error, NoWorker)
    assert "out of memory: 2.1 GB at layer 30" in str(client.error)
    assert "the file is damaged" in str(client.error)

    await asyncio.sleep(FAILURE_PAUSE)
    client = await coordinator.request("qwen3")
    await pause()
    assert len(first.orders) + len(second.orders) == 3


@scripted(run_placing)
async def test_a_machine_that_is_lost_while_it_loads_is_replaced(
    coordinator: Coordinator,
) -> None:
    machines = [
        ScriptedMachine(coordinator.hub, name, QWEN) for name in ("anna", "ben")
    ]
    await run_pending()
    client = await coordinator.request("qwen3")
    await pause()
    (first,) = [each for each in machines if each.orders]
    (second,) = [each for each in machines if not each.orders]

    first.port.on_disconnect("connection reset")
    await asyncio.sleep(15.0)
    await pause()

    assert second.orders
    second.carry_out()
    await pause()
    second.loaded["qwen3"].answer("hi")
    await run_pending()
    assert client.outcome is not None


@scripted(run_placing)
async def test_a_machine_that_comes_back_goes_on_loading(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
    ben = ScriptedMachine(coordinator.hub, "ben")
    await run_pending()
    await coordinator.request("qwen3")
    await pause()
    anna.port.on_disconnect("connection reset")
    await asyncio.sleep(3.0)

    again = ScriptedMachine(coordinator.hub, "anna", QWEN)
    await pause()

    assert again.orders == anna.orders
    assert not ben.orders


@scripted(run_placing)
async def test_what_fits_on_no_machine_is_refused_with_the_sizes(
    coordinator: Coordinator,
) -> None:
    ScriptedMachine(coordinator.hub, "anna", QWEN, memory=1 * GB)
    await run_pending()

    client = await coordinator.request("qwen3")
    await pause()

    assert isinstance(client.error, NoWorker)
    assert "qwen3 cannot be loaded: " in str(client.error)
    assert "2.2 GB" in str(client.error)
    assert "anna has 1.0 GB" in str(client.error)


@scripted(run_placing)
async def test_what_nobody_has_is_unknown_and_a_wrong_kind_is_refused(
    coordinator: Coordinator,
) -> None:
    ScriptedMachine(coordinator.hub, "anna", QWEN)
    await run_pending()

    unknown = await coordinator.request("qwen4")
    embedding = await coordinator.request("qwen3", kind=JobKind.EMBEDDING)

    assert isinstance(unknown.error, UnknownModel)
    assert isinstance(embedding.error, CannotDo)
    assert "qwen3 supports chat here, but not embedding" in str(embedding.error)


@scripted(run_placing)
async def test_a_library_for_other_keys_loads_nothing(coordinator: Coordinator) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN, only_for=frozenset({"ben"}))
    await run_pending()

    client = await coordinator.request("qwen3", owner="carl")
    await pause()

    assert isinstance(client.error, Forbidden)
    assert not anna.orders


@scripted(run_placing)
async def test_another_model_makes_room(coordinator: Coordinator) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN, LLAMA, memory=4 * GB)
    await run_pending()
    await coordinator.request("qwen3")
    await pause()
    anna.carry_out()
    await pause()
    anna.loaded["qwen3"].answer("hi")

    await asyncio.sleep(100.0)
    client = await coordinator.request("llama")
    await pause()

    assert anna.orders[1:] == [
        ModelOrder(ModelAction.UNLOAD, "qwen3", "wire:anna/*models", room_for="llama")
    ]
    anna.carry_out()
    await pause()
    assert anna.orders[2:] == [
        ModelOrder(ModelAction.LOAD, "llama", "wire:anna/*models")
    ]
    anna.carry_out()
    await pause()
    anna.loaded["llama"].answer("hi")
    await run_pending()
    assert client.outcome is not None


@scripted(run_placing)
async def test_deployments_are_loaded_and_kept_over_a_restart(
    coordinator: Coordinator,
) -> None:
    machines = [
        ScriptedMachine(coordinator.hub, name, QWEN) for name in ("anna", "ben")
    ]
    deployed = DeploymentSet("qwen3", 2, "al", pinned=True)
    await coordinator.hub.process(DeploymentOrder("qwen3", deployed, "al"))
    await pause()
    assert [len(each.orders) for each in machines] == [1, 1]
    assert await coordinator.store.deployments() == [deployed]
    for each in machines:
        each.carry_out()
    await pause()
    assert [each.orders[1:] for each in machines] == [[], []]

    await coordinator.hub.process(DeploymentOrder("qwen3", None, "al"))
    assert await coordinator.store.deployments() == []
    await asyncio.sleep(2000.0)
    unloads = [each.orders[1].action for each in machines]
    assert unloads == [ModelAction.UNLOAD] * 2


@scripted(run_placing)
async def test_a_request_waits_for_what_a_deployment_has_from_the_hub(
    coordinator: Coordinator,
) -> None:
    ScriptedMachine(coordinator.hub, "ben", QWEN)
    anna = ScriptedMachine(coordinator.hub, "anna", fetches=True)
    await run_pending()
    source = HubModel("org/gemma", "gemma.gguf", "a" * 40, 2 * GB)
    assert isinstance((await coordinator.request("gemma")).error, UnknownModel)
    deployed = DeploymentSet("gemma", 1, "al", hub=source)
    await coordinator.hub.process(DeploymentOrder("gemma", deployed, "al"))

    client = await coordinator.request("gemma")
    hurried = await coordinator.request("gemma", TimeLimits(queue=5.0))
    await pause()
    anna.progress(0.25, "500 MB of 2.0 GB copied")
    await asyncio.sleep(6.0)

    assert [each.hub for each in anna.orders] == [source]
    assert isinstance(hurried.error, ModelLoading)
    assert hurried.error.loading["bytes"] == GB // 2
    anna.carry_out()
    await pause()
    anna.loaded["gemma"].answer("hello")
    await run_pending()
    assert client.outcome is not None
    assert client.outcome.output == "hello"


@scripted(run_placing)
async def test_a_request_for_any_model_has_none_copied_from_the_hub(
    coordinator: Coordinator,
) -> None:
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN, fetches=True)
    source = HubModel("org/gemma", "gemma.gguf", "a" * 40, 3 * GB)
    deployed = DeploymentSet("gemma", 1, "al", schedule=("mon 3:00-3:01",), hub=source)
    await coordinator.hub.process(DeploymentOrder("gemma", deployed, "al"))

    await coordinator.request(ANY_MODEL)
    await pause()

    assert [each.name for each in anna.orders] == ["qwen3"]


@scripted(run_script)
async def test_a_deployment_follows_its_timetable(coordinator: Coordinator) -> None:
    loop = asyncio.get_running_loop()
    clock = LoopClock(lambda: 1_800_000_000.0 + loop.time())  # at a full hour
    Placer(coordinator.hub, clock)
    anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
    hour = local_time(clock).hour
    times = f"{(hour + 1) % 24}:00-{(hour + 2) % 24}:00"
    deployed = DeploymentSet("qwen3", 1, "al", pinned=True, schedule=(times,))
    await coordinator.hub.process(DeploymentOrder("qwen3", deployed, "al"))
    await pause()
    assert anna.orders == [], "it is not due yet"

    await asyncio.sleep(3600.0 + 2 * LOOK_EVERY)
    assert [each.action for each in anna.orders] == [ModelAction.LOAD]
    anna.carry_out()
    await asyncio.sleep(1700.0)
    assert len(anna.orders) == 1, "it is idle, and kept"

    await asyncio.sleep(3600.0 + PlacementRules().idle)
    assert anna.orders[1].action is ModelAction.UNLOAD


@scripted(run_placing)
async def test_a_deployment_grows_by_requests_that_wait(
    coordinator: Coordinator,
) -> None:
    machines = [
        ScriptedMachine(coordinator.hub, name, QWEN) for name in ("anna", "ben")
    ]
    deployed = DeploymentSet("qwen3", 0, "al", most=2)
    await coordinator.hub.process(DeploymentOrder("qwen3", deployed, "al"))
    await pause()
    first, other = sorted(machines, key=lambda each: -len(each.orders))
    first.carry_out()
    await asyncio.sleep(PlacementRules().settles)

    for _ in range(4):  # all slots
        await coordinator.request("qwen3", PATIENT)
    await asyncio.sleep(5.0)
    assert not other.orders
    for _ in range(2):
        await coordinator.request("qwen3", PATIENT)
    await asyncio.sleep(5.0)
    assert len(other.orders) == 1


@scripted(run_placing)
async def test_an_order_waits_for_the_next_start(coordinator: Coordinator) -> None:
    ScriptedMachine(coordinator.hub, "anna", QWEN)
    deployed = DeploymentSet("qwen3", 1, "al")
    await coordinator.hub.process(DeploymentOrder("qwen3", deployed, "al"))
    await pause()
    assert len(coordinator.hub.pool.model_orders) == 1

    await asyncio.wait_for(coordinator.hub.drain(), 5.0)


def test_an_order_goes_on_after_a_restart(store: SlowStore) -> None:
    async def first(coordinator: Coordinator) -> None:
        Placer(coordinator.hub, LoopClock())
        anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
        await run_pending()
        Client(coordinator.hub, coordinator.job("qwen3", PATIENT, key="k"))
        await pause()
        assert len(anna.orders) == 1

    async def second(coordinator: Coordinator) -> None:
        Placer(coordinator.hub, LoopClock())
        anna = ScriptedMachine(coordinator.hub, "anna", QWEN)
        await pause()
        await asyncio.sleep(5.0)
        assert anna.orders == [
            ModelOrder(ModelAction.LOAD, "qwen3", "wire:anna/*models")
        ]
        anna.carry_out()
        await pause()
        assert [each.work.model for each in anna.loaded["qwen3"].runs] == ["qwen3"]

    run_script(first, store)
    run_script(second, store)
