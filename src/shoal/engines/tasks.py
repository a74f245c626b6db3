"""Does tasks that have a name with a model that chats.

What can be computed is: words are counted, and JSON that stands in a text is found by a
parser.  What the model adds is checked before it is passed on.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from shoal.domain.errors import InvalidRequest
from shoal.domain.work import ANY_MODEL, JSON, Call, Kind, Lane, Task, Work
from shoal.domain.worker import Model
from shoal.engines.asking import Asker
from shoal.engines.classifying import SENTIMENTS, classify, read_labels
from shoal.engines.extracting import extract_json
from shoal.engines.port import Engine, Finished, Item
from shoal.engines.summarizing import summarize

Payload: TypeAlias = Mapping[str, JSON]

LABELS = ("labels", "categories")
"""The fields of a payload that may say what to choose from."""


class WithTasks:
    """Does what an engine does with one of its models, and tasks besides."""

    def __init__(self, engine: Engine, model: Model) -> None:
        self._engine = engine
        self._model = model

    def run(self, work: Work, continues: str = "") -> AsyncGenerator[Item, None]:
        """Do ``work`` as ``Engine.run`` does; a task's answer is one piece, of JSON.

        Raises InvalidRequest also for a task that is not known.
        """
        if isinstance(work, Task):
            return _run(self._engine, self._model, work)
        if isinstance(work, Call | Lane):
            raise InvalidRequest("a model calls no functions")
        if work.model == ANY_MODEL:
            work = replace(work, model=self._model.name)
        return self._engine.run(work, continues)


async def _run(engine: Engine, model: Model, task: Task) -> AsyncGenerator[Item, None]:
    if Kind.CHAT not in model.kinds:
        raise InvalidRequest(f"{model.name} does no chats, and so no tasks")
    if (do := _TASKS.get(task.name)) is None:
        known = ", ".join(sorted(TASK_NAMES))
        raise InvalidRequest(f"there is no task {task.name!r:.100}; known: {known}")
    payload = task.payload if isinstance(task.payload, Mapping) else {}
    text = payload.get("input")
    if not isinstance(text, str):
        raise InvalidRequest("input: expected a text", "input")
    asker = Asker(engine, model)
    yield await do(asker, text, payload)
    yield Finished("stop", asker.usage)


async def _summarize(asker: Asker, text: str, payload: Payload) -> str:
    return await summarize(asker, text)


async def _classify(asker: Asker, text: str, payload: Payload) -> str:
    for name in LABELS:
        if (labels := payload.get(name)) is not None:
            return await classify(asker, text, read_labels(labels, name))
    return await classify(asker, text, SENTIMENTS)


async def _extract_json(asker: Asker, text: str, payload: Payload) -> str:
    return await extract_json(asker, text)


_TASKS: Mapping[str, Callable[[Asker, str, Payload], Awaitable[str]]] = {
    "classify": _classify,
    "extract_json": _extract_json,
    "summarize": _summarize,
}

TASK_NAMES = frozenset(_TASKS)
