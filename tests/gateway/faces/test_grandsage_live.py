"""Complete conversations recorded with the original server, replayed.

Where the original has a fault, or Shoal deviates by intent, the conversation of Shoal
is in a table here, with the reason.
"""

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.replay import BODY, KEYS, Replay, Step
from gateway.serving import serving
from protocols.grandsage.recorded import CASES, Case, of_kind
from shoal.domain.job import TimeLimits
from shoal.domain.moderation import Moderation

# The recordings' clock ran 20 times faster than the original's.
LIMITS: dict[str, TimeLimits] = {
    "timeout-30s": TimeLimits(queue=0.1),
    "timeout-600s": TimeLimits(total=0.5),
    "timeout-600s-lost-node": TimeLimits(queue=0.4, total=1.5),
}


def task(name: str) -> str:
    """Return the task of the default chat; ``name`` is the placeholder of its id."""
    (recorded,) = CASES["queue-other-model"]["transcript"][2]["node_received"]["n2"]
    assert isinstance(recorded, str)
    return recorded.replace("{{id0}}", "{{" + name + "}}")


def greedy(name: str) -> str:
    """Return the task of the default chat without chance, which a node can repeat."""
    return task(name).replace('"temperature":0.5', '"temperature":0')


def stop(name: str) -> str:
    return '{"id":{{' + name + '}},"stop":true}'


def received(**texts: str) -> dict[str, Any]:
    """Return the expected messages to nodes in a step."""
    return {"node_received": {node: [text] for node, text in texts.items()}}


def lines(chat: str, text: str, *, ended: bool = False) -> dict[str, Any]:
    """Return the expected lines to a client in a step."""
    return {"http_new": {chat: {"text": text, "ended": ended}}}


GREEDY = {"body": BODY.replace('"temperature":0.5', '"temperature":0')}
ONE_SLOT = {"q": {"max_concurrency": "1"}}
N1 = "/ws?name=n1&model=m1&token=nt&max_concurrency=1"
DONE = '{"done":true}\n'
LATER = {"chat": "c9", "body": '{"model":"zzz","messages":[]}'} | lines(
    "c9", '{"err":"unknown model"}\n', ended=True
)
REFUSED = {"node_closed": {"n1": {"code": 1002}}}
MODERATED = (
    '{"e":" ","err":"moderation","mod":{"eng":0,"suggestion":"stop"},"done":true}\n'
)

DIFFERENCES: dict[str, tuple[str, list[Step]]] = {
    "queue-first-node-first": (
        "the least busy node comes first",
        [
            {"node": "n1", "q": {"max_concurrency": "2"}},
            {"node": "n2", "q": {"max_concurrency": "2"}},
            {"chat": "c0", **received(n1=task("id0"))},
            {"chat": "c1", **received(n2=task("id1"))},
            {"chat": "c2", **received(n1=task("id2"))},
        ],
    ),
    "stop-on-client-gone": (
        "the stop is sent at once, and once",
        [
            {"node": "n1"},
            {"chat": "c0", **received(n1=task("id0"))},
            {"send": "n1", "hex": "{{id0}}61", **lines("c0", '{"o":"a"}\n')},
            {"abort": "c0", **received(n1=stop("id0"))},
            {"send": "n1", "hex": "{{id0}}62"},
            {"send": "n1", "hex": "{{id0}}63"},
        ],
    ),
    "client-gone-while-queued": (
        "a request whose client has gone is dropped from the queue",
        [
            {"node": "n1", **ONE_SLOT},
            {"chat": "c0", **received(n1=task("id0"))},
            {"chat": "c1"},
            {"abort": "c1"},
            {"send": "n1", "hex": "{{id0}}", **lines("c0", DONE, ended=True)},
        ],
    ),
    "reconnect-replaces": (
        "frames may be lost with a connection, so the task is begun again",
        [
            {"node": "n1", **ONE_SLOT},
            {"chat": "c0", **GREEDY, **received(n1=greedy("id0"))},
            {"send": "n1", "hex": "{{id0}}61", **lines("c0", '{"o":"a"}\n')},
            {
                "node": "n1b",
                "path": N1,
                "node_closed": {"n1": {"code": 4000}},
                **received(n1b=greedy("id1")),
            },
            {"send": "n1b", "hex": "{{id0}}62", **received(n1b=stop("id0"))},
            {"send": "n1b", "hex": "{{id1}}6162", **lines("c0", '{"o":"b"}\n')},
            {"send": "n1b", "hex": "{{id1}}", **lines("c0", DONE, ended=True)},
        ],
    ),
    "reconnect-old-socket-data": (
        "frames may be lost with a connection, so the task is begun again",
        [
            {"node": "n1"},
            {"chat": "c0", **received(n1=task("id0"))},
            {
                "node": "n1b",
                "path": N1,
                "node_closed": {"n1": {"code": 4000}},
                **received(n1b=task("id1")),
            },
            {"send": "n1", "hex": "{{id0}}61"},
            {"send": "n1b", "hex": "{{id1}}", **lines("c0", DONE, ended=True)},
        ],
    ),
    "disconnect-running": (
        "a lost node's task is given out again, and its slot is free",
        [
            {"node": "n1", **ONE_SLOT},
            {"chat": "c0", **GREEDY, **received(n1=greedy("id0"))},
            {"send": "n1", "hex": "{{id0}}61", **lines("c0", '{"o":"a"}\n')},
            {"terminate": "n1", "node_closed": {"n1": {"code": 1006}}},
            {"node": "n1c", "path": N1, **received(n1c=greedy("id0c"))},
            {"chat": "c1"},
            {"send": "n1c", "hex": "{{id0c}}6162", **lines("c0", '{"o":"b"}\n')},
            {
                "send": "n1c",
                "hex": "{{id0c}}",
                **lines("c0", DONE, ended=True),
                **received(n1c=task("id1")),
            },
        ],
    ),
    "disconnect-other-node-idle": (
        "a lost node's task goes to an idle one",
        [
            {"node": "n1", **ONE_SLOT},
            {"node": "n2", **ONE_SLOT},
            {"chat": "c0", **received(n1=task("id0"))},
            {"terminate": "n1", **received(n2=task("id1"))},
            {"send": "n2", "hex": "{{id1}}", **lines("c0", DONE, ended=True)},
        ],
    ),
    "name-collision": (
        "name and model are kept apart",
        [
            {
                "node": "n1",
                "path": "/ws?name=b-c&model=a&token=nt&max_concurrency=1",
            },
            {
                "node": "n2",
                "path": "/ws?name=c&model=a-b&token=nt&max_concurrency=1",
            },
            {
                "chat": "c0",
                "body": '{"model":"a","messages":[{"content":"hi"}],'
                '"temperature":0.5,"max_new_tokens":10}',
                **received(n1=task("id0")),
            },
            {
                "chat": "c1",
                "body": '{"model":"a-b","messages":[{"content":"hi"}],'
                '"temperature":0.5,"max_new_tokens":10}',
                **received(n2=task("id1")),
            },
        ],
    ),
    "moderation-output": (
        "a node that was just told to stop is not told again",
        [
            {"node": "n1"},
            {"chat": "c0", **received(n1=task("id0"))},
            {
                "send": "n1",
                "hex": "{{id0}}" + b"x".hex() * 44 + b"fooxbar".hex(),
                **received(n1=stop("id0")),
                **lines("c0", MODERATED, ended=True),
            },
            {"send": "n1", "hex": "{{id0}}6d6f7265"},
        ],
    ),
    "moderation-output-end": (
        "a node that has ended need not be stopped",
        [
            {"node": "n1"},
            {"chat": "c0", **received(n1=task("id0"))},
            {
                "send": "n1",
                "hex": "{{id0}}" + b"badword".hex(),
                **lines("c0", '{"o":"badword"}\n'),
            },
            {"send": "n1", "hex": "{{id0}}", **lines("c0", MODERATED, ended=True)},
        ],
    ),
    **{
        f"crash-short-frame-{size}": (
            "the node is refused and the server lives",
            [
                {"node": "n1"},
                {"send": "n1", "hex": "010203"[: 2 * size], **REFUSED},
                LATER,
            ],
        )
        for size in (0, 1, 3)
    },
    **{
        f"crash-model-{name}": (
            "no model name is special",
            [
                {
                    "node": "n1",
                    "path": f"/ws?name=n1&model={model}&token=nt&max_concurrency=8",
                },
                {
                    "chat": "c0",
                    "body": f'{{"model":"{model}","messages":[{{"content":"hi"}}],'
                    '"temperature":0.5,"max_new_tokens":10}',
                    **received(n1=task("id0")),
                },
                {"send": "n1", "hex": "{{id0}}", **lines("c0", DONE, ended=True)},
            ],
        )
        for name, model in (("proto", "__proto__"), ("constructor", "constructor"))
    },
    "crash-unauth-bad-frame": (
        "the server lives",
        [CASES["crash-unauth-bad-frame"]["transcript"][0], LATER],
    ),
    "authed-bad-frame": (
        "a frame without a mask is read like any other, for the library does",
        [
            {"node": "n1"},
            dict(CASES["authed-bad-frame"]["transcript"][1], server_bytes_hex=""),
            {"chat": "c0", **received(n1=task("id0"))},
        ],
    ),
    "timeout-30s": (
        "a request that has been answered is dropped from the queue",
        [
            {"node": "n1", **ONE_SLOT},
            {"chat": "c0", **received(n1=task("id0"))},
            {
                "chat": "c1",
                **lines("c1", '{"err":"timeout waiting for node"}\n', ended=True),
            },
            {"send": "n1", "hex": "{{id0}}", **lines("c0", DONE, ended=True)},
        ],
    ),
    "timeout-600s-lost-node": (
        "a lost node's task is given out again",
        [
            {"node": "n1", **ONE_SLOT},
            {"chat": "c0", **received(n1=task("id0"))},
            {"terminate": "n1"},
            {"node": "n1d", "path": N1, **received(n1d=task("id0d"))},
            {
                "chat": "c1",
                **lines("c1", '{"err":"timeout waiting for node"}\n', ended=True),
            },
            {
                "chat": "noop",
                "body": '{"model":"zzz","messages":[]}',
                "http_new": {
                    "noop": {"text": '{"err":"unknown model"}\n', "ended": True},
                    "c0": {
                        "text": '{"err":"timeout waiting for finish"}\n',
                        "ended": True,
                    },
                },
                **received(n1d=stop("id0d")),
            },
            {"chat": "c2", **received(n1d=task("id2"))},
        ],
    ),
}


@of_kind("live")
async def test_conversations_match_the_recordings(tmp_path: Path, case: Case) -> None:
    listed = case.get("files", {}).get("mod.lst")
    async with (
        serving(
            tmp_path,
            keys=KEYS,
            limits=LIMITS.get(case["id"]),
            moderation=Moderation(listed) if listed else None,
            bypass=frozenset({"bob"}),
        ) as pool,
        AsyncExitStack() as stack,
    ):
        replay = Replay(pool, stack)
        _, steps = DIFFERENCES.get(case["id"], ("", case["transcript"]))
        for step in steps:
            await replay.play(step)
        await replay.check_silence()


def test_the_table_names_recorded_cases() -> None:
    assert DIFFERENCES.keys() | LIMITS.keys() <= CASES.keys()


@pytest.mark.parametrize("name", sorted(DIFFERENCES))
def test_every_difference_is_real(name: str) -> None:
    _, steps = DIFFERENCES[name]

    assert steps != CASES[name]["transcript"]


def test_every_recorded_kind_is_replayed() -> None:
    here = {"request_to_task", "http_auth", "frames_to_http", "live"}
    elsewhere = {"node_connect", "node_behaviour"}  # with the protocol

    assert {case["kind"] for case in CASES.values()} == here | elsewhere
