"""The embedded engine: llama.cpp's server in a child process.

A crash in native code ends the running jobs, never the worker: they fail as
unavailable, and the next job starts a new child.  What its server would ignore of a
job is written in another way, or refused.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from shoal.config.installation import install_extra
from shoal.domain import work as works
from shoal.domain.errors import ConfigError, InvalidRequest, Unavailable
from shoal.domain.worker import ServedModel
from shoal.engines.continuation import continue_answer
from shoal.engines.engine import Activity, Finished, Item
from shoal.engines.engine_child import CLOSED, LlamaProcess, activity_of
from shoal.engines.llama_child import MODEL, ModelToOpen
from shoal.engines.openai_server import OpenAIEngine
from shoal.engines.resources import processors, threads_for
from shoal.engines.schemas.plain_schema import plain_schema
from shoal.engines.server_errors import ServerLost
from shoal.engines.server_kinds import TEXT, Way

CONTEXT = 4096  # tokens of each slot, unless the model was trained for fewer
JOBS_PER_SLOT = 4  # that run or wait for a slot of llama.cpp
OTHER_REQUESTS = 4  # that llama.cpp handles beside jobs
RESTART_DELAY_MAX = 60.0  # seconds
NO_MEMORY = "insufficient memory"  # llama.cpp's words
KILLED = "SIGKILL"  # how Linux ends a process whose memory it needs


KNOWN_PARTS = ("text", "image_url", "input_audio")
LACKING = {
    works.Feature.TOOLS: ("calls no tools: its chat template has none", "tools"),
    works.Feature.IMAGES: ("reads no images", "messages"),
    works.Feature.AUDIO: ("hears no audio", "messages"),
}
"""What a model without the feature cannot do, and the field that asks for it."""


Spawn: TypeAlias = Callable[[], Awaitable[LlamaProcess]]
"""Starts a process without a model.  Raises OSError, or Unavailable."""


class LlamaEngine:
    """Runs a GGUF file.

    Args:
        model: name that clients request.
        path: the GGUF file.
        projector: the GGUF file that makes images or audio tokens of the model.
        slots: concurrent jobs; each has its own share of memory.
        context: maximum tokens of a prompt and its answer together.
        threads: CPU threads; None: the engine's choice for this machine.
        kinds: the kinds of work that the file declares; loading it shows the rest.
        spawn: starts its process; None: one with the embedded engine.
    """

    def __init__(
        self,
        model: str,
        path: Path,
        *,
        projector: Path | None = None,
        slots: int = 4,
        context: int = CONTEXT,
        threads: int | None = None,
        kinds: frozenset[works.JobKind] = TEXT,
        spawn: Spawn | None = None,
    ) -> None:
        self.model = model
        self.slots = slots
        self._path = path
        self._model = ModelToOpen(
            path=str(path),
            projector=str(projector or ""),
            slots=slots,
            context=context,
            threads=threads or threads_for(*processors()),
            requests=JOBS_PER_SLOT * slots + OTHER_REQUESTS,
        )
        self._served = ServedModel(model, kinds, context=context)
        self._spawn = spawn
        self._jobs = 0
        self._process: LlamaProcess | None = None
        self._server: OpenAIEngine | None = None
        self._closed = False
        self._failures = 0  # processes lost since the last finished job
        self._restart_at = 0.0  # event loop time
        self._restart_reason = ""
        # Jobs that arrive without a process wait for the same new one.
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process ID of the child, for monitoring."""
        return self._process.child.pid if self._process is not None else None

    def activity(self) -> Activity | None:
        """Return what the child has done so far; None: there is none."""
        return None if self.pid is None else activity_of(self.pid)

    async def start(self) -> None:
        check = check_installed if self._spawn is None else check_file
        await asyncio.to_thread(check, self._path)
        try:
            await self._running()
        except Unavailable as error:
            killed = KILLED in str(error)
            advice = f". {advice_on(NO_MEMORY)}" if killed else ""
            raise ConfigError(f"{self._path}: {error}{advice}") from error

    @property
    def models(self) -> Sequence[ServedModel]:
        return [self._served]

    async def refresh(self) -> None:
        if self._closed:
            raise Unavailable(CLOSED)
        # A lost process is replaced when the next job arrives.
        wait = self._restart_at - asyncio.get_running_loop().time()
        if wait > 0:
            raise Unavailable(self._restart_reason, retry_after=math.ceil(wait))

    async def run(
        self, work: works.Inference, continues: str = "", thoughts: str = ""
    ) -> AsyncGenerator[Item, None]:
        try:
            process, server = await self._running()
        except ConfigError as error:
            raise Unavailable(str(error)) from error
        if work.kind not in self._served.kinds:
            raise InvalidRequest(f"{self.model} does not run {work.kind.value} jobs")
        if self._jobs >= JOBS_PER_SLOT * self.slots:
            raise Unavailable(f"{self._jobs} jobs for {self.slots} slots")
        work = replace(plain_work(work, self._served.features), model=MODEL)
        # The server would generate a token even for a limit of 0.
        begun = continues or thoughts
        if not isinstance(work, works.InputWork) and (begun or work.max_tokens == 0):
            answer = continue_answer(server, work, continues, Way.TEMPLATE, thoughts)
        else:
            answer = server.generate(work)
        self._jobs += 1
        try:
            async with aclosing(answer) as items:
                async for item in items:
                    if isinstance(item, Finished):
                        self._failures = 0
                    yield item
        except ServerLost as error:
            reason = await process.child.exit_reason_soon()
            raise Unavailable(reason or str(error)) from error
        finally:
            self._jobs -= 1

    async def close(self) -> None:
        self._closed = True
        if self._process is not None:
            await self._process.close()

    async def _running(self) -> tuple[LlamaProcess, OpenAIEngine]:
        """Return a process with the model loaded; start one if there is none.

        Raises ConfigError if the model cannot be loaded, and Unavailable during the
        restart delay after repeated failures.
        """
        async with self._starting:
            now = asyncio.get_running_loop().time()
            if self._process is not None:
                exit_reason = self._process.child.exit_reason
                if exit_reason is None and self._server is not None:
                    return self._process, self._server
                await self._process.close()
                self._restart_reason = self._process.child.exit_reason or CLOSED
                self._process = self._server = None
                self._failures += 1
                self._restart_at = now + restart_delay(self._failures)
            if (wait := self._restart_at - now) > 0:
                raise Unavailable(self._restart_reason, retry_after=math.ceil(wait))
            return await self._start_process()

    async def _start_process(self) -> tuple[LlamaProcess, OpenAIEngine]:
        if self._closed:
            raise Unavailable(CLOSED)
        try:
            process = await (self._spawn or LlamaProcess.spawn)()
        except OSError as error:
            raise Unavailable(f"cannot start a process: {error}") from error
        # Set before it loads, so that close() can end it.
        self._process = process
        try:
            if self._closed:
                raise Unavailable(CLOSED)
            server, kinds = await process.open(self._model)
        except ConfigError as error:
            await process.close()
            beside = f" with {file}" if (file := self._model.projector) else ""
            reason = str(error)
            raise ConfigError(
                f"{self._path}{beside} cannot be loaded: {reason}. {advice_on(reason)}"
            ) from error
        except BaseException:
            await process.close()
            raise
        (loaded,) = server.models
        features = loaded.features | {works.Feature.CONTINUE} if kinds == TEXT else ()
        self._served = ServedModel(
            self.model, kinds, frozenset(features), loaded.context
        )
        self._server = server
        return process, server


def advice_on(reason: str) -> str:
    """Return what to do about a model that llama.cpp cannot load."""
    if NO_MEMORY in reason or "failed to allocate" in reason:
        return (
            "If the memory was full: give it fewer --slots or a shorter --context, or "
            "choose a smaller model."
        )
    return "Download it again, or choose a model that this version of llama.cpp knows."


def restart_delay(failures: int) -> float:
    """Return the delay in seconds after consecutive lost processes.

    The first is replaced at once: most crashes are caused by one unusual request.
    """
    if failures <= 1:
        return 0.0
    return min(2.0 ** min(failures - 2, 10), RESTART_DELAY_MAX)


def is_installed() -> bool:
    """Return whether this machine has the engine."""
    return find_spec("xllamacpp") is not None


def check_installed(path: Path) -> None:
    """Raise ConfigError if the engine or the model file is missing."""
    if not is_installed():
        raise ConfigError(
            f"the embedded engine is not installed: {install_extra('llm')}"
        )
    check_file(path)


def check_file(path: Path) -> None:
    """Raise ConfigError if it is no GGUF file."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Give the path of a GGUF file."
        ) from error
    if magic != b"GGUF":
        raise ConfigError(
            f"{path} is not a GGUF file: it begins with {magic!r}. Give the path of "
            "one."
        )


def plain_work(work: works.Inference, features: Set[works.Feature]) -> works.Inference:
    """Return the job as llama.cpp's server should see it.

    Raises InvalidRequest if a model with these ``features`` cannot do it.
    """
    if isinstance(work, works.InputWork):
        return work
    for feature, (fault, field) in LACKING.items():
        if feature in work.needs - features:
            raise InvalidRequest(f"this model {fault}", field)
    if work.options.get("logprobs") is True and "top_logprobs" not in work.options:
        # llama.cpp's default is 20.
        work = replace(work, options={**work.options, "top_logprobs": 1})
    if isinstance(work, works.Completion):
        return work
    return replace(
        work,
        messages=tuple(map(plain_message, work.messages)),
        options=plain_options(work.options),
    )


def plain_options(options: Mapping[str, works.JSON]) -> Mapping[str, works.JSON]:
    """Return the options with schemas that llama.cpp obeys.

    Those of tools are only adapted if they are strict: others are best effort.

    Raises InvalidRequest naming a part of a schema that it would ignore.
    """
    found = dict(options)
    if isinstance(form := found.get("response_format"), Mapping):
        found["response_format"] = _plain_format(form)
    tools = found.get("tools")
    if isinstance(tools, Sequence) and not isinstance(tools, str):
        found["tools"] = [_plain_tool(tool, index) for index, tool in enumerate(tools)]
    return found


def _plain_format(form: Mapping[str, works.JSON]) -> works.JSON:
    described, path = form.get("json_schema"), "response_format"
    if not isinstance(described, Mapping):
        return _with_plain_schema(form, "schema", path)
    path = f"{path}.json_schema"
    return {**form, "json_schema": _with_plain_schema(described, "schema", path)}


def _plain_tool(tool: works.JSON, index: int) -> works.JSON:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
        return tool
    if function.get("strict") is not True:
        return tool
    path = f"tools[{index}].function"
    return {**tool, "function": _with_plain_schema(function, "parameters", path)}


def _with_plain_schema(
    described: Mapping[str, works.JSON], name: str, path: str
) -> Mapping[str, works.JSON]:
    schema = described.get(name)
    if schema is None:
        return described
    return {**described, name: plain_schema(schema, f"{path}.{name}")}


def plain_message(message: Mapping[str, works.JSON]) -> Mapping[str, works.JSON]:
    """Return the message with its parts joined to one text, if all of them are texts.

    llama.cpp would join them by line breaks.

    Raises InvalidRequest if llama.cpp would have to fetch a part, or does not know it.
    """
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return message
    kinds = [part.get("type") for part in content if isinstance(part, Mapping)]
    if unknown := [each for each in kinds if each not in KNOWN_PARTS]:
        raise InvalidRequest(f"no model reads {unknown[0]!r:.40}", "messages")
    if kinds and all(each == "text" for each in kinds):
        return {**message, "content": works.message_text(message)}
    for part in content:
        image = part.get("image_url") if isinstance(part, Mapping) else None
        url = image.get("url") if isinstance(image, Mapping) else None
        if url is not None and not str(url).startswith("data:"):
            raise InvalidRequest(
                "the embedded engine fetches no images: send a data: URL", "messages"
            )
    return message
