"""All-reduce of float32 vectors among ranks on this machine, against gloo.

The same processes have a group of either backend of torch.distributed, with one thread
each, and take turns.  Shoal's ranks use local sockets, gloo's TCP, as either does when
ranks are on one machine.  Each round is one all-reduce after a barrier, timed in rank
0; CPU is that of all ranks.  Beside it, blocking sockets move the bytes that one of two
ranks sends (bench/yardstick_transport.py): the loopback limit of one direction.
"""

import json
import os
import time
from collections import defaultdict
from contextlib import ExitStack, closing

import yardstick_transport
from processes import HERE, free_port, program
from report import Goal, Results

ROUNDS = 7
SIZES = (1, 10, 25, 100)  # MB
RANKS = (2, 4)
BACKENDS = ("shoal", "gloo")

TIME = "{backend}, {ranks} ranks, {size} MB: ms"
COST = "{backend}, {ranks} ranks, {size} MB: CPU ms"
LIMIT = "loopback, {size} MB one way: ms"
GOALS = [
    Goal(
        TIME.format(backend="gloo", ranks=ranks, size=size),
        TIME.format(backend="shoal", ranks=ranks, size=size),
        at_least=1.15 if size >= 10 else 0.0,
    )
    for ranks in RANKS
    for size in SIZES
] + [
    Goal(TIME.format(backend="shoal", ranks=2, size=size), LIMIT.format(size=size))
    for size in SIZES
]


def measure(rounds: int) -> Results:
    results: Results = defaultdict(list)
    for ranks in RANKS:
        port = str(free_port())
        script = str(HERE / "allreduce_rank.py")
        with ExitStack() as stack:
            members = [
                stack.enter_context(
                    program(script, port, str(rank), str(ranks), str(rounds))
                )
                for rank in reversed(range(ranks))
            ]
            first = members[-1]
            assert first.process.stdout is not None
            for line in first.process.stdout:
                found = json.loads(line)
                row = {"ranks": ranks, **found}
                results[TIME.format(**row)].append(found["seconds"] * 1e3)
                results[COST.format(**row)].append(found["cpu"] * 1e3)
            for member in members:
                member.process.wait()
    yardstick = yardstick_transport.serve(None)
    for _ in range(rounds):
        for size in SIZES:
            # Of two ranks each sends half the vector twice, in pieces of at most 64 MB.
            payload = os.urandom(min(size, 50) * 1_000_000)
            with closing(yardstick_transport.connect(yardstick, secure=False)) as sock:
                began = time.perf_counter()
                for _ in range(max(1, size // 50)):
                    yardstick_transport.send(sock, payload)
                taken = time.perf_counter() - began
            results[LIMIT.format(size=size)].append(taken * 1e3)
    return dict(results)
