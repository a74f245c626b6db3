"""OpenAI chats through Shoal, LiteLLM's proxy 1.106.2 and vllm-router 0.1.17.

All three stand before the same engine (bench/engine.py), which answers with 64 chunks,
in a burst or 25 a second.  Shoal runs as it comes, with a key and a durable record of
every job, and with one worker, whose CPU time is told apart; LiteLLM has a master key
and one process; vllm-router asks for no key and keeps no record.  CPU time is that of
the gateway's processes; latency is what one client waits beyond the engine's own time.
"""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack

from load import ask_all, holding, request, run
from peers import KEY, Gateway, litellm, shoal, vllm_router
from processes import HERE, program
from report import Goal, Results

ROUNDS = 5
CELLS = [(pace, streams) for pace in ("burst", "paced") for streams in (16, 64, 256)]
BURSTS = 256  # answers of a round at least, where they come in a burst
REQUESTS = 256  # not streamed, of a round
REQUESTERS = 16  # at once
SINGLE = 200  # requests of a round by one client
HELD = 1000  # streams
ROUTER = {"burst": 4, "paced": 1.2}  # times vllm-router's CPU time, at most

COST = "{pace}, {streams} streams at once: CPU µs a stream"
NOT_STREAMED = f"not streamed, {REQUESTERS} at once: CPU µs a request"
ADDED = "one client, not streamed: ms added"
ADDED_FIRST = "one client, streamed: ms added to the first text"
MEMORY = f"{HELD} open streams: MB"


def _goals(row: str, litellm: float, vllm_router: float) -> list[Goal]:
    return [
        Goal(f"shoal, {row}", f"litellm, {row}", at_most=litellm),
        Goal(f"shoal, {row}", f"vllm-router, {row}", at_most=vllm_router),
    ]


GOALS = [
    *(
        goal
        for pace, streams in CELLS
        for goal in _goals(
            COST.format(pace=pace, streams=streams), 1 / 20, ROUTER[pace]
        )
    ),
    *_goals(NOT_STREAMED, 1 / 20, 8),
    Goal(f"shoal, {ADDED}", at_most=2),
    Goal(f"shoal, {ADDED_FIRST}", at_most=1.5),
    Goal(f"shoal, {MEMORY}", at_most=120),
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    with program(str(HERE / "engine.py")) as engine, ExitStack() as stack:
        port = int(engine.report["port"])
        gateways = [
            stack.enter_context(start(port)) for start in (shoal, litellm, vllm_router)
        ]
        for _ in range(rounds):
            _round(gateways, port, results)
            gateways.reverse()
    for _ in range(rounds):
        for start in (shoal, litellm):
            # An engine of its own, or its first must forget the last one's streams.
            with ExitStack() as stack:
                engine = stack.enter_context(program(str(HERE / "engine.py")))
                gateway = stack.enter_context(start(int(engine.report["port"])))
                run(_memory(gateway, results))
    return results


def _round(gateways: Sequence[Gateway], engine: int, results: Results) -> None:
    for pace, streams in CELLS:
        answers = max(BURSTS if pace == "burst" else 0, 2 * streams)
        asked = request(pace, key=KEY, stream=True)
        row = COST.format(pace=pace, streams=streams)
        for gateway in gateways:
            _cost(gateway, asked, streams, answers, row, results)
    asked = request("burst", key=KEY, stream=False)
    for gateway in gateways:
        _cost(gateway, asked, REQUESTERS, REQUESTS, NOT_STREAMED, results)
    for gateway in gateways:
        _latency(gateway, engine, results)


def _cost(
    gateway: Gateway, asked: bytes, clients: int, answers: int, row: str, out: Results
) -> None:
    """Measure the CPU time for each answer, the worker's apart."""
    programs = {gateway.name: gateway.program}
    if gateway.worker is not None:
        programs[f"{gateway.name}'s worker"] = gateway.worker
    before = {name: each.cpu() for name, each in programs.items()}
    run(ask_all(gateway.port, asked, clients, answers))
    for name, each in programs.items():
        out[f"{name}, {row}"].append((each.cpu() - before[name]) / answers * 1e6)


def _latency(gateway: Gateway, engine: int, out: Results) -> None:
    """Measure what one client waits beyond what it waits for the engine."""
    whole = request("burst", key=KEY, stream=False)
    streamed = request("burst", key=KEY, stream=True)
    for row, asked, seconds in (
        (ADDED, whole, lambda took: took.whole),
        (ADDED_FIRST, streamed, lambda took: took.first),
    ):
        direct, through = (
            statistics.median(map(seconds, run(ask_all(port, asked, 1, SINGLE))))
            for port in (engine, gateway.port)
        )
        out[f"{gateway.name}, {row}"].append((through - direct) * 1e3)


async def _memory(gateway: Gateway, out: Results) -> None:
    """Measure the resident memory while streams are open, the worker's apart."""
    held = request("held", key=KEY, stream=True)
    async with holding(gateway.port, held, HELD):
        out[f"{gateway.name}, {MEMORY}"].append(gateway.program.memory())
        if gateway.worker is not None:
            out[f"{gateway.name}'s worker, {MEMORY}"].append(gateway.worker.memory())
