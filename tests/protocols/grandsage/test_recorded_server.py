"""The coordinator's end against exchanges recorded with the original server.

Every difference from the recordings is in a table here, with its reason.
"""

import json
from typing import Any

import pytest

from protocols.grandsage.recorded import (
    CASES,
    NOW,
    Case,
    accept,
    as_recorded,
    chat_of,
    each_of_kind,
    http_lines,
    joined,
    run,
)
from protocols.session_pair import sent
from shoal.domain.errors import PeerError, Refused
from shoal.domain.vocabulary import Dismiss, Event, Joined
from shoal.domain.work import Chat
from shoal.protocols.seam.session import Close, CoordinatorEnd, Output

ALL_TASKS = "the user's name is not sent: the original gives nodes the user's record"

TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "req-system-number": ("a system text that is no text kills nodes", {"system": ""}),
    "req-role-number": (
        "a role that is no text kills nodes",
        {"messages": [{"role": "user", "content": "x"}]},
    ),
    "req-content-object": (
        "a content that is no text kills nodes",
        {"messages": [{"role": "user", "content": ""}]},
    ),
    "req-max-neg": ("a negative limit kills nodes", {"max_new_tokens": 1}),
    "req-max-huge": (
        "a node drops a task with a limit beyond its context",
        {"max_new_tokens": 1024},
    ),
    "req-unicode": (
        "half a character cannot be written in UTF-8",
        {"messages": [{"role": "user", "content": "日本 😀 \u2028 \ufffd"}]},
    ),
}

BODIES = {
    "frames-split-2byte": ("a split character is kept whole", ["é"]),
    "frames-split-3byte": ("a split character is kept whole", ["a", "日b"]),
    "frames-split-4byte": ("a split character is kept whole", ["😀"]),
}

LIVE = {
    "crash-short-frame-0": "the node is refused; the original server exits",
    "crash-short-frame-1": "the node is refused; the original server exits",
    "crash-short-frame-3": "the node is refused; the original server exits",
    "crash-model-proto": "a model like any other; the original server exits",
    "crash-model-constructor": "a model like any other; the original server exits",
    "name-collision": "name and model are kept apart",
    "reconnect-replaces": "tasks of the old connection are given to a node anew",
    "stop-on-client-gone": "the stop is sent at once, and once",
}
LIVE_ALIKE = {"wrong-node-answers", "two-tasks-interleaved", "queue-concurrency-string"}
LIVE_ALIKE |= {"queue-concurrency-abc"}


def test_the_tables_name_recorded_cases() -> None:
    named = TASKS.keys() | BODIES.keys() | LIVE.keys() | LIVE_ALIKE

    assert named <= CASES.keys()


@each_of_kind("node_connect")
def test_nodes_are_admitted_and_refused_as_recorded(case: Case) -> None:
    if case["accepted"]:
        assert accept(case["path"]).session.accepts
    else:
        with pytest.raises(Refused) as refused:
            accept(case["path"])
        assert refused.value.code == case["close"]["code"]
        assert str(refused.value) == case["close"]["reason"]


@each_of_kind("request_to_task")
def test_tasks_are_encoded_as_recorded(case: Case) -> None:
    if case["task_text"] is None:
        return  # refused before there is a task
    recorded = json.loads(
        case["task_text"].replace("{{id}}", "1").replace("{{now}}", "2")
    )
    session = joined()

    (text,) = sent(session.send(run(chat_of(recorded)), NOW))

    assert isinstance(text, str)
    task = json.loads(text)
    text = as_recorded(text, task["id"])
    if case["id"] in TASKS:
        _, changes = TASKS[case["id"]]
        times = {key: task[key] for key in ("id", "created_at", "user")}
        assert task == recorded | changes | times
        assert list(task) == list(recorded)
    else:
        assert text == case["task_text"].replace('"alice"', '"-"'), ALL_TASKS


@each_of_kind("frames_to_http")
def test_frames_are_decoded_as_recorded(case: Case) -> None:
    session = joined()
    task_id = begin(session, "job")

    outputs = replay(session, case["frames"], {"{{id}}": task_id})

    body = case["response"]["body"]
    if case["id"] in BODIES:
        _, texts = BODIES[case["id"]]
        body = "".join(f'{{"o":"{text}"}}\n' for text in texts) + '{"done":true}\n'
    assert http_lines(outputs) == body
    assert sent(outputs) == [
        text.replace("{{id+1}}", str(task_id + 1)).replace("{{id}}", str(task_id))
        for text in case["node_received"]
    ]


@pytest.mark.parametrize("name", [name for name in LIVE if "short-frame" in name])
def test_a_frame_without_an_id_is_refused(name: str) -> None:
    (frame,) = [step["hex"] for step in CASES[name]["transcript"] if "hex" in step]

    with pytest.raises(PeerError, match="expected a task id"):
        joined().receive([bytes.fromhex(frame)], NOW)


@pytest.mark.parametrize("name", ["crash-model-proto", "crash-model-constructor"])
def test_no_model_name_is_special(name: str) -> None:
    (step,) = [step for step in CASES[name]["transcript"] if "path" in step]

    (event,) = accept(step["path"]).session.tick(0.0)

    assert isinstance(event, Joined)
    assert event.offer.models <= {"__proto__", "constructor"}


def test_name_and_model_are_kept_apart() -> None:
    paths = [s["path"] for s in CASES["name-collision"]["transcript"] if "path" in s]

    names = [accept(path).session.tick(0.0)[0] for path in paths]

    assert [n.name for n in names if isinstance(n, Joined)] == ["b-c/a", "c/a-b"]


def test_a_replaced_node_is_closed_with_bye() -> None:
    (step,) = [
        step
        for step in CASES["reconnect-replaces"]["transcript"]
        if "node_closed" in step
    ]

    (close,) = joined().send(Dismiss("a newer connection", replaced=True), NOW)

    assert isinstance(close, Close)
    recorded = step["node_closed"]["n1"]
    assert (close.code, close.text) == (recorded["code"], recorded["reason"])


def test_late_text_on_a_new_connection_is_answered_with_a_stop() -> None:
    task_id = begin(joined(), "job")

    outputs = replay(joined(), ["{{id}}62"], {"{{id}}": task_id})

    assert sent(outputs) == [f'{{"id":{task_id},"stop":true}}']


@pytest.mark.parametrize("name", sorted(LIVE_ALIKE))
def test_conversations_proceed_as_recorded(name: str) -> None:
    sessions: dict[str, CoordinatorEnd] = {}
    ids: dict[str, int] = {}
    for step in CASES[name]["transcript"]:
        heard = step.get("node_received", {})
        if "node" in step:
            query = {"name": step["node"], "model": "m1", "token": "nt"}
            query |= {"max_concurrency": "8"} | step.get("q", {})
            target = "/ws?" + "&".join(f"{k}={v}" for k, v in query.items())
            sessions[step["node"]] = accept(target).session
            (event, *_) = sessions[step["node"]].tick(0.0)
            assert isinstance(event, Joined)
            slots = {"2.5": 3, "abc": 0}.get(query["max_concurrency"], 8)
            assert event.offer.slots == slots
        elif "chat" in step and heard:
            ((node, _),) = heard.items()
            placeholder = "{{id" + step["chat"][1:] + "}}"
            ids[placeholder] = begin(sessions[node], step["chat"])
        elif "send" in step:
            outputs = replay(sessions[step["send"]], [step["hex"]], ids)
            expected = "".join(new["text"] for new in step.get("http_new", {}).values())
            assert http_lines(outputs) == expected
            stops = [text for texts in heard.values() for text in texts]
            for placeholder, task_id in ids.items():
                stops = [text.replace(placeholder, str(task_id)) for text in stops]
            assert sent(outputs) == stops


def begin(session: CoordinatorEnd, name: str) -> int:
    """Give the node a task; return its id."""
    chat = Chat("m1", ({"role": "user", "content": "hi"},))
    (text,) = sent(session.send(run(chat, name), NOW))
    assert isinstance(text, str)
    task_id = json.loads(text)["id"]
    assert isinstance(task_id, int)
    return task_id


def replay(
    session: CoordinatorEnd, frames: list[Any], ids: dict[str, int]
) -> list[Event | Output]:
    """Feed recorded frames to the session."""
    outputs: list[Event | Output] = []
    for frame in frames:
        if isinstance(frame, dict):
            outputs += session.receive([frame["text"]], NOW)
            continue
        for placeholder, task_id in ids.items():
            after = placeholder.replace("}}", "+1}}")
            frame = frame.replace(placeholder, f"{task_id:08x}")
            frame = frame.replace(after, f"{task_id + 1:08x}")
        outputs += session.receive([bytes.fromhex(frame)], NOW)
    return outputs
