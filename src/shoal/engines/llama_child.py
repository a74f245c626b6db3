"""The child process of the embedded engine, which runs llama.cpp in isolation.

A fault in native code ends this process and not the worker.  The engine starts it as
``python -m shoal.engines.llama_child``; it reads orders from standard input and exits
when that is closed, so it never outlives the engine.  One thread reads the orders, and
each job has a thread of its own; llama.cpp batches concurrent jobs.
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
from typing import Any, BinaryIO
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


def problem_in(answer: Any) -> ServerProblem | None:
    """Return the error in an answer of llama.cpp, if it is one."""
    if isinstance(answer, dict) and "error" in answer:
        return msgspec.convert(answer["error"], ServerProblem)
    return None


def refusal_of(id: int, problem: ServerProblem) -> JobRefused:
    code = problem.code
    return JobRefused(id, problem.message, code if isinstance(code, int) else 500)


class ChunkForwarder:
    """Forwards the chunks of llama.cpp's callback, and records how they ended."""

    def __init__(
        self, run: StartJob, abort: threading.Event, send: Callable[[ToEngine], None]
    ) -> None:
        choices = max(1, run.request.get("n") or 1)
        self._id = run.id
        self._abort = abort
        self._send = send
        self._several = choices * run.prompts > 1
        self._finish_reason: str | None = None
        self._tally = UsageTally(choices, run.prompts)
        self._refused: JobRefused | None = None

    def on_chunk(self, data: Any) -> bool:
        """Handle a chunk; return whether to stop.

        llama.cpp's binding swallows exceptions, so none is raised.
        """
        try:
            self._pass_on(data)
        except Exception as error:
            self._refused = JobRefused(self._id, str(error))
        return self._refused is not None or self._abort.is_set()

    def finish(self, begun: int) -> AnswerEnded | JobRefused:
        """Return the end; ``begun`` tokens of the prompt belong to the answer."""
        if self._refused is not None:
            return self._refused
        if self._finish_reason is None or self._abort.is_set():
            reason = "aborted" if self._abort.is_set() else "llama.cpp gave no answer"
            return JobRefused(self._id, reason)
        usage = self._tally.usage() or Usage(0, 0)
        prompt, written = usage.prompt_tokens, usage.completion_tokens
        return AnswerEnded(
            self._id, self._finish_reason, prompt - begun, written + begun
        )

    def _pass_on(self, data: Any) -> None:
        if data is None or self._abort.is_set():
            return  # llama.cpp calls back without a chunk when it reads several prompts
        if (problem := problem_in(data)) is not None:
            self._refused = refusal_of(self._id, problem)
            return
        chunk = msgspec.convert(data, StreamChunk)
        if chunk.usage is not None:
            self._tally.add(chunk.usage)
        for choice in chunk.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            piece = piece_from_choice(choice, self._several)
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
    orders, replies = claim_pipes()
    link = EngineLink(orders, replies)
    load = link.receive()
    if not isinstance(load, OpenModel):
        os._exit(0 if load is None else 2)
    try:
        llama = Llama(load)
    except (RuntimeError, ImportError) as error:
        link.send(LoadFailed(str(error)))
        sys.exit(1)
    link.send(ModelOpened(llama.context(), llama.embeddings))
    serve(llama, link)
    # Threads may be blocked in native code, so do not wait for them.
    os._exit(0)


def claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes to the engine, and reserve them for its messages.

    Native code may print.  From here on, standard output is redirected to standard
    error, and standard input is empty.
    """
    orders = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return orders, replies


class EngineLink:
    """Messages to and from the engine; any thread may send."""

    def __init__(self, orders: BinaryIO, replies: BinaryIO) -> None:
        self._orders = orders
        self._replies = replies
        self._sending = threading.Lock()

    def receive(self) -> ToChild | None:
        """Wait for the next order; None when the engine has closed the pipe."""
        header = self._orders.read(SIZE.size)
        if len(header) < SIZE.size:
            return None
        data = self._orders.read(size := message_size(header))
        return decode_to_child(data) if len(data) == size else None

    def send(self, message: ToEngine) -> None:
        """Send, blocking while the pipe is full; exit if the engine has gone."""
        unsent = memoryview(encode_message(message))
        with self._sending:
            try:
                while unsent:
                    unsent = unsent[self._replies.write(unsent) :]
            except OSError:
                os._exit(0)


def serve(llama: "Llama", link: EngineLink) -> None:
    """Carry out orders until the engine closes the pipe."""
    aborts: dict[int, threading.Event] = {}

    def answer(run: StartJob, abort: threading.Event) -> None:
        try:
            last: ToEngine = llama.answer(run, abort, link)
        # The binding raises this for an invalid request.
        except (ValueError, RuntimeError) as error:
            last = JobRefused(run.id, str(error), 400)
        # Any error ends this job only: other jobs share the process.
        except Exception as error:
            last = JobRefused(run.id, str(error) or type(error).__name__)
        del aborts[run.id]
        link.send(last)

    while (order := link.receive()) is not None:
        match order:
            case StartJob():
                abort = aborts[order.id] = threading.Event()
                threading.Thread(
                    target=answer, args=(order, abort), daemon=True
                ).start()
            case AbortJob():
                if (known := aborts.get(order.id)) is not None:
                    known.set()
            case OpenModel():
                raise AssertionError("a second Load")


class Llama:
    """A loaded model.  Raises RuntimeError if llama.cpp cannot open it.

    Loading it holds the GIL, so orders are read only afterwards.
    """

    def __init__(self, load: OpenModel) -> None:
        import xllamacpp  # 100 MB of native code: only the child loads it

        params = xllamacpp.CommonParams()
        params.model.path = load.path
        params.n_parallel = load.slots
        # Divided among slots; llama.cpp limits each to the model's training size.
        params.n_ctx = load.slots * load.context
        params.n_batch = params.n_ubatch = BATCH
        self.embeddings = params.embedding = is_embedding_model(Path(load.path))
        if self.embeddings:
            # Each input must fit into one batch.
            params.n_batch = params.n_ubatch = load.context
        params.cpuparams.n_threads = load.threads
        params.cpuparams_batch.n_threads = load.threads
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
        return int(self._ask("/props")["default_generation_settings"]["n_ctx"])

    def answer(
        self, run: StartJob, abort: threading.Event, link: EngineLink
    ) -> AnswerEnded | JobRefused:
        """Send the pieces of an answer; return its end."""
        if run.kind is JobKind.EMBEDDING:
            return self._embed(run, link)
        request = run.request | {
            "stream": True,
            "stream_options": {"include_usage": True},
            # Progress callbacks let an abort take effect while a prompt is read.
            "return_progress": True,
        }
        begun = prompt_tokens = 0
        if run.beginning or run.max_tokens == 0:
            prompt_tokens = self._prompt_tokens(request)
            prefill_answer(request, run.beginning)
            begun = self._prompt_tokens(request) - prompt_tokens if run.beginning else 0
        if run.max_tokens is not None:
            left = run.max_tokens - begun
            if left <= 0:
                return AnswerEnded(run.id, "length", prompt_tokens, begun)
            request["max_tokens"] = left
        reading = ChunkForwarder(run, abort, link.send)
        if run.kind is JobKind.CHAT:
            self._server.handle_chat_completions(request, reading.on_chunk)
        else:
            self._server.handle_completions(request, reading.on_chunk)
        return reading.finish(begun)

    def _embed(self, run: StartJob, link: EngineLink) -> AnswerEnded | JobRefused:
        answer = self._server.handle_embeddings(run.request)
        if (problem := problem_in(answer)) is not None:
            return refusal_of(run.id, problem)
        inputs = len(run.request["input"])
        try:
            pieces, usage = decode_embeddings(json.dumps(answer).encode(), inputs)
        except ShoalError as error:
            return JobRefused(run.id, str(error))
        for piece in pieces:
            link.send(FieldsPiece(run.id, piece.choice, dict(piece.fields)))
        return AnswerEnded(run.id, "stop", usage.prompt_tokens if usage else 0, 0)

    def _prompt_tokens(self, request: dict[str, Any]) -> int:
        """Count the tokens of the prompt, a prefilled beginning included."""
        prompt = request.get("prompt")
        if prompt is None:
            prompt = self._ask("/apply-template", request)["prompt"]
        ask = {"content": prompt, "add_special": True, "parse_special": True}
        return len(self._ask("/tokenize", ask)["tokens"])

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
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
            answer = json.load(connection.getresponse())
        finally:
            connection.close()
        if (problem := problem_in(answer)) is not None:
            raise RuntimeError(problem.message)
        return answer


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
