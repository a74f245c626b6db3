"""The child process of the embedded engine, which runs llama.cpp in isolation.

A fault in native code ends this process and not the worker.  The engine starts it as
``python -m shoal.engines.llama_child``; it reads commands from standard input and exits
when that is closed, so it never outlives the engine.  One thread reads the commands,
and each job has a thread of its own; llama.cpp batches concurrent jobs.
"""

import http.client
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shoal.domain.errors import ShoalError
from shoal.domain.outcome import Usage
from shoal.domain.work import JobKind
from shoal.engines.answers import decode_embeddings
from shoal.engines.gguf_files import is_embedding_model
from shoal.engines.llama_messages import (
    SIZE,
    AbortJob,
    AnswerEnded,
    FieldsPiece,
    JobRefused,
    LoadFailed,
    ModelOpened,
    OpenModel,
    StartJob,
    TextPiece,
    ToChild,
    ToEngine,
    decode_to_child,
    encode_message,
    message_size,
)
from shoal.engines.stream_chunks import (
    ServerProblem,
    StreamChunk,
    UsageTally,
    piece_from_choice,
)
from shoal.processes.child import claim_pipes, write_all


def problem_in(response: Any) -> ServerProblem | None:
    """Return the error in a response of llama.cpp, if it is one."""
    if isinstance(response, dict) and "error" in response:
        return msgspec.convert(response["error"], ServerProblem)
    return None


def refusal(id: int, problem: ServerProblem) -> JobRefused:
    code = problem.code
    return JobRefused(id, problem.message, code if isinstance(code, int) else 500)


class ChunkForwarder:
    """Forwards the chunks of llama.cpp's callback, and records how the answer ended."""

    def __init__(
        self, job: StartJob, abort: threading.Event, send: Callable[[ToEngine], None]
    ) -> None:
        choices = max(1, job.request.get("n") or 1)
        self._id = job.id
        self._abort = abort
        self._send = send
        self._multiple_choices = choices * job.prompts > 1
        self._finish_reason: str | None = None
        self._tally = UsageTally(choices, job.prompts)
        self._refusal: JobRefused | None = None

    def on_chunk(self, data: Any) -> bool:
        """Handle a chunk; return whether to stop.

        llama.cpp's binding swallows exceptions, so none is raised.
        """
        try:
            self._forward(data)
        except Exception as error:
            self._refusal = JobRefused(self._id, str(error))
        return self._refusal is not None or self._abort.is_set()

    def finish(self, prefilled: int) -> AnswerEnded | JobRefused:
        """Return the end; ``prefilled`` tokens of the prompt belong to the answer."""
        if self._refusal is not None:
            return self._refusal
        if self._finish_reason is None or self._abort.is_set():
            reason = (
                "aborted" if self._abort.is_set() else "llama.cpp returned no answer"
            )
            return JobRefused(self._id, reason)
        usage = self._tally.usage() or Usage(0, 0)
        prompt, written = usage.prompt_tokens, usage.completion_tokens
        return AnswerEnded(
            self._id, self._finish_reason, prompt - prefilled, written + prefilled
        )

    def _forward(self, data: Any) -> None:
        if data is None or self._abort.is_set():
            return  # llama.cpp calls back without a chunk when it reads several prompts
        if (problem := problem_in(data)) is not None:
            self._refusal = refusal(self._id, problem)
            return
        chunk = msgspec.convert(data, StreamChunk)
        if chunk.usage is not None:
            self._tally.add(chunk.usage)
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            piece = piece_from_choice(choice, self._multiple_choices)
            if isinstance(piece, str):
                self._send(TextPiece(self._id, piece))
            elif piece is not None:
                self._send(
                    FieldsPiece(
                        self._id,
                        piece.choice,
                        dict(piece.fields),
                        piece.logprobs,
                        piece.finish_reason,
                    )
                )


LOG_VERBOSITY = 2  # of llama.cpp's levels of verbosity: errors and warnings
BATCH = 512  # tokens of a prompt read at a time: an abort takes effect between them
COUNT_LIMIT = 60.0  # seconds for llama.cpp to count tokens, which takes milliseconds


def main() -> None:
    # Ctrl-C reaches the whole process group; the engine decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = EngineLink(*claim_pipes())
    model = link.receive()
    if not isinstance(model, OpenModel):
        os._exit(0 if model is None else 2)
    try:
        llama = Llama(model)
    except (RuntimeError, ImportError) as error:
        link.send(LoadFailed(str(error)))
        sys.exit(1)
    link.send(ModelOpened(llama.context(), llama.embeddings))
    serve(llama, link)
    # Threads may be blocked in native code, so do not wait for them.
    os._exit(0)


class EngineLink:
    """Messages to and from the engine; any thread may send."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands = os.fdopen(commands, "rb")
        self._replies = replies
        self._sending = threading.Lock()

    def receive(self) -> ToChild | None:
        """Wait for the next command; None when the engine has closed the pipe."""
        header = self._commands.read(SIZE.size)
        if len(header) < SIZE.size:
            return None
        data = self._commands.read(size := message_size(header))
        return decode_to_child(data) if len(data) == size else None

    def send(self, message: ToEngine) -> None:
        """Send, blocking while the pipe is full; exit if the engine has ended."""
        data = encode_message(message)
        with self._sending:
            try:
                write_all(self._replies, data)
            except OSError:
                os._exit(0)


def serve(llama: "Llama", link: EngineLink) -> None:
    """Carry out commands until the engine closes the pipe."""
    aborts: dict[int, threading.Event] = {}

    def run_job(job: StartJob, abort: threading.Event) -> None:
        try:
            end: ToEngine = llama.run_job(job, abort, link)
        # The binding raises this for an invalid request.
        except (ValueError, RuntimeError) as error:
            end = JobRefused(job.id, str(error), 400)
        # Any error ends this job only: other jobs share the process.
        except Exception as error:
            end = JobRefused(job.id, str(error) or type(error).__name__)
        del aborts[job.id]
        link.send(end)

    while (command := link.receive()) is not None:
        match command:
            case StartJob():
                abort = aborts[command.id] = threading.Event()
                threading.Thread(
                    target=run_job, args=(command, abort), daemon=True
                ).start()
            case AbortJob():
                if (running := aborts.get(command.id)) is not None:
                    running.set()
            case OpenModel():
                raise AssertionError("a second OpenModel")


class Llama:
    """A loaded model.  Raises RuntimeError if llama.cpp cannot open it.

    Loading it holds the GIL, so commands are read only afterwards.
    """

    def __init__(self, model: OpenModel) -> None:
        import xllamacpp  # 100 MB of native code: only the child loads it

        params = xllamacpp.CommonParams()
        params.model.path = model.path
        params.n_parallel = model.slots
        # Divided among slots; llama.cpp limits each to the model's training size.
        params.n_ctx = model.slots * model.context
        params.n_batch = params.n_ubatch = BATCH
        self.embeddings = params.embedding = is_embedding_model(Path(model.path))
        if self.embeddings:
            # Each input must fit into one batch.
            params.n_batch = params.n_ubatch = model.context
        params.cpuparams.n_threads = model.threads
        params.cpuparams_batch.n_threads = model.threads
        params.verbosity = LOG_VERBOSITY
        params.warmup = False
        # Otherwise llama.cpp caches finished prompts in up to 8 GiB of memory.
        params.cache_ram_mib = 0
        # Raw generated text: only that can be continued by another worker.
        formats = xllamacpp.common_reasoning_format
        params.reasoning_format = formats.COMMON_REASONING_FORMAT_NONE
        # llama.cpp requires a port; no other program must be able to use it.
        self._key = secrets.token_urlsafe(32)
        params.api_keys = [self._key]
        params.endpoint_slots = False
        params.ui = False
        params.n_threads_http = 2
        self._server: Any = xllamacpp.Server(params)
        self._address: str = urlsplit(self._server.listening_address).netloc

    def context(self) -> int:
        """Return the actual context of a slot, in tokens."""
        return int(self._query("/props")["default_generation_settings"]["n_ctx"])

    def run_job(
        self, job: StartJob, abort: threading.Event, link: EngineLink
    ) -> AnswerEnded | JobRefused:
        """Send the pieces of an answer; return its end."""
        match job.kind:
            case JobKind.EMBEDDING:
                return self._run_embedding(job, link)
            case JobKind.CHAT:
                generate = self._server.handle_chat_completions
            case JobKind.COMPLETION:
                generate = self._server.handle_completions
            case JobKind.TASK | JobKind.CALL | JobKind.CALL_STREAM:
                raise AssertionError(f"no model does a {job.kind.value} by itself")
        request = job.request | {
            "stream": True,
            "stream_options": {"include_usage": True},
            # Progress callbacks let an abort take effect while a prompt is read.
            "return_progress": True,
        }
        prefilled = prompt_tokens = 0
        if job.beginning or job.max_tokens == 0:
            prompt_tokens = self._prompt_tokens(request)
            prefill_answer(request, job.beginning)
            prefilled = (
                self._prompt_tokens(request) - prompt_tokens if job.beginning else 0
            )
        if job.max_tokens is not None:
            remaining = job.max_tokens - prefilled
            if remaining <= 0:
                return AnswerEnded(job.id, "length", prompt_tokens, prefilled)
            request["max_tokens"] = remaining
        forwarder = ChunkForwarder(job, abort, link.send)
        generate(request, forwarder.on_chunk)
        return forwarder.finish(prefilled)

    def _run_embedding(
        self, job: StartJob, link: EngineLink
    ) -> AnswerEnded | JobRefused:
        response = self._server.handle_embeddings(job.request)
        if (problem := problem_in(response)) is not None:
            return refusal(job.id, problem)
        inputs = len(job.request["input"])
        try:
            pieces, usage = decode_embeddings(json.dumps(response).encode(), inputs)
        except ShoalError as error:
            return JobRefused(job.id, str(error))
        for piece in pieces:
            link.send(FieldsPiece(job.id, piece.choice, dict(piece.fields)))
        return AnswerEnded(job.id, "stop", usage.prompt_tokens if usage else 0, 0)

    def _prompt_tokens(self, request: dict[str, Any]) -> int:
        """Count the tokens of the prompt, a prefilled beginning included."""
        prompt = request.get("prompt")
        if prompt is None:
            prompt = self._query("/apply-template", request)["prompt"]
        body = {"content": prompt, "add_special": True, "parse_special": True}
        return len(self._query("/tokenize", body)["tokens"])

    def _query(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Query llama.cpp's HTTP port: its Python interface cannot tokenise."""
        connection = http.client.HTTPConnection(self._address, timeout=COUNT_LIMIT)
        try:
            headers = {
                "Authorization": f"Bearer {self._key}",
                "Content-Type": "application/json",
            }
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                connection.request("POST", path, json.dumps(body), headers)
            response = json.load(connection.getresponse())
        finally:
            connection.close()
        if (problem := problem_in(response)) is not None:
            raise RuntimeError(problem.message)
        return response


def prefill_answer(request: dict[str, Any], beginning: str) -> None:
    """Change the request so that llama.cpp continues after ``beginning``.

    llama.cpp continues a final assistant message, and accepts only one.
    """
    if "prompt" in request:
        request["prompt"] += beginning
        return
    messages = request["messages"]
    if not beginning:
        return
    if messages and messages[-1].get("role") == "assistant":
        last = messages[-1]
        last = last | {"content": last["content"] + beginning}
        request["messages"] = [*messages[:-1], last]
    else:
        request["messages"] = [*messages, {"role": "assistant", "content": beginning}]


if __name__ == "__main__":
    main()
