"""Workers and clients that come and go, as many as wanted, in this process."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from random import Random
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

import shoal
from harness.speed import scaled
from shoal.cli.worker.join_target import direct_address
from shoal.domain.errors import ShoalError
from shoal.domain.work import Feature, JobKind
from shoal.domain.worker import CHAT_ONLY, Offer, ServedModel
from shoal.ledger.keys import Signer
from shoal.protocols import discover
from shoal.protocols.seam.context import WorkerProfile
from shoal.protocols.seam.protocol import AnyWireProtocol
from shoal.transports.clock import LoopClock
from shoal.transports.dialer import dial
from shoal.worker.agent import Agent, WorkerEvent
from shoal.worker.blob_cache import BlobCache
from shoal.worker.calls import FunctionBackend
from shoal.worker.jobs import EngineSlots, FindModel, only_model
from simulation.engine import SimEngine
from simulation.functions import NAME, Made, SimCaller

MODELS = ("small", "large")
CHAT = "/v1/chat/completions"
JOBS = "/v1/jobs/commit/cheap"
JOIN_MAX = scaled(30.0)  # seconds until a worker gives up
STAY = (0.5, 8.0)  # seconds that a worker stays, from and to
PAUSE = (0.0, 0.5)  # seconds between the requests of a client
AWAY = (0.0, 1.0)  # seconds until it comes back
BY_RELAY = 0.25  # the share of TealeNet's workers that use a relay, not the LAN
PACE = (0.001, 0.01)  # seconds for a piece of an answer, or a call, from and to
TIMEOUT = ClientTimeout(total=scaled(60.0))
FLOOD_PATIENCE = scaled(2.0)  # seconds
CALLS_AT_ONCE = 20
CALL_QUEUE = 5.0  # seconds that a call may wait

PROTOCOLS = discover()
WITH_MODELS = [each for each in PROTOCOLS.values() if JobKind.CHAT in each.kinds]
WITH_CALLS = [each for each in PROTOCOLS.values() if JobKind.CALL in each.kinds]


class Comers:
    """Workers and clients of one coordinator.

    ``lan`` is its address for TealeNet's peers.  ``seen`` counts how the requests of
    clients ended, and ``joined`` the workers.
    """

    def __init__(
        self, url: str, lan: str, key: str, token: str, random: Random
    ) -> None:
        self.seen: Counter[str] = Counter()
        self.joined = 0
        self._url = url
        self._lan = lan
        self._key = key
        self._token = token
        self._random = random
        self._health: object = None
        self._made = Made()
        self._numbers = 0

    async def run(self, workers: int, clients: int, seconds: float) -> None:
        """Have so many workers and clients come and go for a time, then none.

        On a busy machine for longer, until each has come and gone about once.
        """
        joined, served = self.joined, self.seen["served"]
        blobs = BlobCache()
        async with ClientSession(connector=TCPConnector(limit=0)) as session:
            async with session.get(f"{self._url}/healthz") as answer:
                self._health = await answer.json()
            coming = [self._member(number, blobs) for number in range(workers)]
            coming += [self._client(number) for number in range(clients)]
            tasks = [asyncio.create_task(each) for each in coming]
            await asyncio.wait(tasks, timeout=seconds)
            while (  # noqa: ASYNC110  # nothing tells when it is
                self.joined - joined < 2 * workers
                or self.seen["served"] - served < 3 * clients
            ):
                await asyncio.sleep(0.1)
            for each in tasks:
                each.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended
        await blobs.close()

    async def flood(self, requests: int) -> None:
        """Send so many requests at once, none of which can be answered, and leave."""
        question = "a question of many words " * 2000
        async with ClientSession(connector=TCPConnector(limit=0)) as session:

            async def ask() -> None:
                with suppress(TimeoutError, ClientError):
                    async with asyncio.timeout(FLOOD_PATIENCE):
                        await self._chat(session, question, stream=True)

            await asyncio.gather(*(ask() for _ in range(requests)))

    # Workers.

    async def _member(self, number: int, blobs: BlobCache) -> None:
        """Be a worker that comes and goes, in turn with and without a farewell."""
        with_calls = number % 4 == 3
        protocols = WITH_CALLS if with_calls else WITH_MODELS
        protocol = protocols[number // 4 % len(protocols)]
        await asyncio.sleep(self._random.uniform(0.0, 1.0))
        name = f"w{number}"
        while True:
            if number % 8 < 4:  # the others come back under their names
                name = f"w{number}-{self._number()}"
            joined = asyncio.Event()
            agent = (
                self._caller(protocol, name, blobs, joined)
                if with_calls
                else self._model(protocol, name, number, joined)
            )
            serving = asyncio.create_task(agent.run())
            try:
                with suppress(TimeoutError):  # the machine may be busy
                    async with asyncio.timeout(JOIN_MAX):
                        await joined.wait()
                self.joined += joined.is_set()
                await asyncio.wait([serving], timeout=self._random.uniform(*STAY))
                if number % 2:
                    agent.leave()
                    await asyncio.wait([serving], timeout=1.0)
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
            await asyncio.sleep(self._random.uniform(*AWAY))

    def _model(
        self, protocol: AnyWireProtocol, name: str, number: int, joined: asyncio.Event
    ) -> Agent:
        model = MODELS[number % len(MODELS)]
        slots = 4
        engine = SimEngine(
            *(model, slots, self._random),
            continues=number % 3 > 0,
            refuses=0.02,
            stalls=0.0,
            pace=PACE,
        )
        profile = self._profile(name, engine.models[0], slots)
        offers = None
        if protocol.joint:
            offer = Offer(
                CHAT_ONLY,
                frozenset({model}),
                slots,
                engine.models[0].features,
                public_key=profile.identity.public_key.hex()
                if profile.identity
                else "",
            )
            offers = (offer,)
            profile = replace(profile, offers=offers)
        find = only_model(engine, EngineSlots(slots))
        return self._agent(protocol, profile, find, joined, offers)

    def _caller(
        self,
        protocol: AnyWireProtocol,
        name: str,
        blobs: BlobCache,
        joined: asyncio.Event,
    ) -> Agent:
        caller = SimCaller(4, self._random, self._made, refuses=0.02, pace=PACE)
        offer = Offer(
            frozenset({JobKind.TASK, JobKind.CALL, JobKind.CALL_STREAM}),
            slots=caller.slots,
            features=frozenset({Feature.VALUES}),
            tasks=caller.names,
            streams=False,
        )
        profile = self._profile(name, ServedModel("none"), caller.slots)
        profile = replace(profile, offers=(offer,))
        functions = FunctionBackend(caller, blobs)
        return self._agent(
            protocol, profile, lambda work: None, joined, (offer,), functions
        )

    def _profile(self, name: str, model: ServedModel, slots: int) -> WorkerProfile:
        clock = LoopClock()
        return WorkerProfile(
            name,
            model,
            slots,
            self._token,
            identity=Signer.from_seed(hashlib.sha256(name.encode()).digest()),
            epoch=clock.wall() - clock.now(),
            random_bytes=self._random.randbytes,
        )

    def _agent(
        self,
        protocol: AnyWireProtocol,
        profile: WorkerProfile,
        find: FindModel,
        joined: asyncio.Event,
        offers: tuple[Offer, ...] | None,
        functions: FunctionBackend | None = None,
    ) -> Agent:
        def report(event: WorkerEvent) -> None:
            if event.kind == "joined":
                joined.set()

        on_lan = protocol.name == "tealenet" and self._random.random() >= BY_RELAY
        direct = direct_address(self._url, protocol, self._health)
        profile = replace(profile, direct_url=direct)
        return Agent(
            protocol.dial(self._lan if on_lan else self._url, profile),
            _open_link,
            find,
            LoopClock(),
            self._random,
            report,
            offers=offers,
            functions=functions,
        )

    # Clients.

    async def _client(self, number: int) -> None:
        """Be a client that connects, wants a few things, and goes; again and again."""
        wants: list[Callable[[ClientSession], Coroutine[Any, Any, None]]] = [
            self._read_stream,
            self._leave_stream,
            self._read_whole,
            self._leave_whole,
            self._have_job_done,
            self._read_lists,
        ]
        await asyncio.sleep(self._random.uniform(0.0, 1.0))
        while True:
            if number % 6 == 5:
                await self._counted(self._call_functions())
                await asyncio.sleep(self._random.uniform(*PAUSE))
                continue
            async with ClientSession() as session:
                for _ in range(self._random.randint(1, 5)):
                    await self._counted(self._random.choice(wants)(session))
                    await asyncio.sleep(self._random.uniform(*PAUSE))

    async def _counted(self, request: Coroutine[Any, Any, None]) -> None:
        try:
            await request
        except TimeoutError:
            self.seen["left"] += 1
        except (ClientError, OSError, ShoalError) as error:
            self.seen[type(error).__name__] += 1
        else:
            self.seen["served"] += 1

    async def _read_stream(self, session: ClientSession) -> None:
        await self._chat(session, self._question(), stream=True)

    async def _read_whole(self, session: ClientSession) -> None:
        await self._chat(session, self._question(), stream=False)

    async def _leave_stream(self, session: ClientSession) -> None:
        async with asyncio.timeout(self._random.uniform(0.0, 0.05)):
            await self._chat(session, f"{self._question()} long", stream=True)

    async def _leave_whole(self, session: ClientSession) -> None:
        async with asyncio.timeout(self._random.uniform(0.0, 0.05)):
            await self._chat(session, f"{self._question()} long", stream=False)

    async def _have_job_done(self, session: ClientSession) -> None:
        payload = {"prompt": self._question(), "model": self._random.choice(MODELS)}
        job = {"job_type": "LLM_INFER", "payload": payload, "user_id": "u"}
        key = {"Idempotency-Key": f"key {self._number()}"}
        async with session.post(
            f"{self._url}{JOBS}", json=job, headers=self._headers | key, timeout=TIMEOUT
        ) as answer:
            if answer.status != HTTPStatus.CREATED:  # as where the queue is full
                self.seen[f"job refused with {answer.status}"] += 1
                return
            job_id = (await answer.json())["job_id"]
        async with session.get(
            f"{self._url}/v1/jobs/{job_id}?wait=20",
            headers=self._headers,
            timeout=TIMEOUT,
        ) as answer:
            await answer.read()

    async def _read_lists(self, session: ClientSession) -> None:
        for path in ("/v1/models", "/admin/status", "/admin/jobs", "/metrics"):
            async with session.get(
                self._url + path, headers=self._headers, timeout=TIMEOUT
            ) as answer:
                await answer.read()

    async def _call_functions(self) -> None:
        durable = self._random.random() < 0.5
        async with shoal.AsyncPool(self._url, self._key, durable=durable) as pool:
            # Durable calls outlive their client, until this limit.
            calling = pool.with_options(queue=CALL_QUEUE)
            numbers = [self._number() for _ in range(CALLS_AT_ONCE)]
            calls = (self._square(calling, number) for number in numbers)
            await asyncio.gather(*calls)

    async def _square(self, pool: shoal.AsyncPool, number: int) -> None:
        with suppress(ShoalError, ZeroDivisionError):
            assert await pool.call(NAME, number) == number * number

    async def _chat(
        self, session: ClientSession, question: str, *, stream: bool
    ) -> None:
        body = {
            "model": self._random.choice(MODELS),
            "messages": [{"role": "user", "content": question}],
            "stream": stream,
        }
        async with session.post(
            self._url + CHAT, json=body, headers=self._headers, timeout=TIMEOUT
        ) as answer:
            await answer.read()
            if answer.status != HTTPStatus.OK:
                self.seen[f"chat refused with {answer.status}"] += 1

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"}

    def _question(self) -> str:
        return f"question {self._number()}"

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


@asynccontextmanager
async def _open_link(
    url: str, headers: Mapping[str, str], message_max: int
) -> AsyncIterator[Any]:
    async with dial(url, headers, message_max) as opened:
        yield opened
