"""Stand-ins for servers that load and unload models by APIs of their own.

Each speaks what its documentation says (``engines/server_control.py`` names the pages),
and notes what is asked of a model that is not loaded, which the real one would load for
that, or fail.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from shoal.engines.catalog import ServerQuery, ServerReply

GIB = 1 << 30
POLL = 0.01  # seconds within which it ends
MISSING = 404, {"error": {"message": "no such path", "code": 404}}
HEAD = {"id": "c1", "created": 1, "object": "chat.completion.chunk"}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


class StandIn:
    """What all of them have; ``loaded`` are models, and ``models`` all of them.

    ``broken`` is what the server says of each load; empty: loads succeed.
    """

    owner = ""
    path = "/v1"

    def __init__(self, *models: str, loaded: tuple[str, ...] = ()) -> None:
        self.models = list(models)
        self.loaded = list(loaded)
        self.broken = ""
        self.misdirected: list[str] = []
        self.orders: list[tuple[str, Any]] = []
        """The requests to load and unload, by their paths."""

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return the status and the JSON of the response to a request."""
        if (method, path) == ("GET", f"{self.path}/models"):
            entries = [self.entry(each) for each in self.listed]
            return 200, {"object": "list", "data": entries}
        if method == "POST" and path.startswith("/v1/"):
            if body["model"] not in self.loaded:
                self.misdirected.append(body["model"])
            return 200, None
        return MISSING

    @property
    def listed(self) -> list[str]:
        return self.models

    def entry(self, model: str) -> Any:
        return {"id": model, "object": "model", "owned_by": self.owner}

    async def query(self, query: ServerQuery) -> ServerReply:
        """Answer as over HTTP."""
        path = query.path if query.native else f"/v1{query.path}"
        body = json.loads(query.body) if query.body else None
        method = "GET" if query.body is None else "POST"
        status, value = self.answer(method, path, body)
        return ServerReply(status, json.dumps(value).encode(), "application/json")


class Ollama(StandIn):
    """Ollama's API reference: a request without a prompt loads a model."""

    owner = "library"

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path:
            case "GET", "/api/tags":
                return 200, {"models": [self._model(each) for each in self.models]}
            case "GET", "/api/ps":
                return 200, {"models": [self._model(each) for each in self.loaded]}
            case "POST", "/api/show":
                vectors = "embed" in body["model"]
                return 200, {"capabilities": ["embedding" if vectors else "completion"]}
            case "POST", "/api/generate" | "/api/embed":
                return self._order(path, body)
            case _:
                pass
        return super().answer(method, path, body)

    def _order(self, path: str, body: Any) -> tuple[int, Any]:
        self.orders.append((path, body))
        model, ends = body["model"], body.get("keep_alive") == 0
        if "embed" in model and path == "/api/generate" and not ends:
            return 400, {"error": f'"{model}" does not support generate'}
        if ends and model in self.loaded:
            self.loaded.remove(model)
        if not ends and self.broken:
            return 500, {"error": self.broken}
        if not ends and model not in self.loaded:
            self.loaded.append(model)
        if path == "/api/embed":
            return 200, {"model": model, "embeddings": []}
        reason = "unload" if ends else "load"
        return 200, {"model": model, "done": True, "done_reason": reason}

    def _model(self, name: str) -> Any:
        details = {"format": "gguf", "quantization_level": "Q4_K_M"}
        return {"name": name, "digest": name, "size": 2 * GIB, "details": details}


class LmStudio(StandIn):
    """LM Studio's API, version 1."""

    owner = "organization_owner"

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path:
            case "GET", "/api/v0/models":
                entries = [{"id": each, "type": "llm"} for each in self.models]
                return 200, {"object": "list", "data": entries}
            case "GET", "/api/v1/models":
                return 200, {"models": [self._model(each) for each in self.models]}
            case "POST", "/api/v1/models/load":
                self.orders.append((path, body))
                if self.broken:
                    return 500, {"error": {"message": self.broken}}
                self.loaded.append(body["model"])
                return 200, {
                    **{"type": "llm", "instance_id": body["model"]},
                    **{"load_time_seconds": 9.099, "status": "loaded"},
                }
            case "POST", "/api/v1/models/unload":
                self.orders.append((path, body))
                self.loaded.remove(body["instance_id"].removesuffix(":2"))
                return 200, {"instance_id": body["instance_id"]}
            case "GET" | "POST", _ if not path.startswith("/v1/"):
                # The real one does not know the word "status" here, either.
                return 200, {"error": f"Unexpected endpoint or method. ({path})"}
            case _:
                pass
        return super().answer(method, path, body)

    def _model(self, key: str) -> Any:
        count = self.loaded.count(key)
        ids = [key, f"{key}:2"][:count]
        return {
            **{"type": "llm", "publisher": "p", "key": key, "display_name": key},
            **{"quantization": {"name": "Q4_K_M", "bits_per_weight": 4}},
            **{"size_bytes": 2 * GIB, "max_context_length": 32768, "format": "gguf"},
            "loaded_instances": [
                {"id": each, "config": {"context_length": 4096}} for each in ids
            ],
        }


class Router(StandIn):
    """llama-server in router mode: it says at once that it loads a model."""

    owner = "llamacpp"

    def __init__(self, *models: str, loaded: tuple[str, ...] = ()) -> None:
        super().__init__(*models, loaded=loaded)
        self.loading: list[str] = []
        self.failed: list[str] = []

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path:
            case "GET", "/models":
                listed = [self.entry(each) for each in self.models]
                self.loaded += self.loading  # by the next look
                self.loading.clear()
                return 200, {"data": listed}
            case "POST", "/models/load":
                self.orders.append((path, body))
                (self.failed if self.broken else self.loading).append(body["model"])
                return 200, {"success": True}
            case "POST", "/models/unload":
                self.orders.append((path, body))
                self.loaded.remove(body["model"])
                return 200, {"success": True}
            case _:
                pass
        return super().answer(method, path, body)

    def entry(self, model: str) -> Any:
        status: dict[str, Any] = {"value": "unloaded"}
        if model in self.loaded:
            status["value"] = "loaded"
        elif model in self.loading:
            status["value"] = "loading"
        elif model in self.failed:
            status |= {"failed": True, "exit_code": 1}
        entry = {**super().entry(model), "status": status}
        return {**entry, "meta": {"size": 2 * GIB}} if model in self.loaded else entry


class SleepingVllm(StandIn):
    """vLLM with ``--enable-sleep-mode`` and ``VLLM_SERVER_DEV_MODE=1``.

    The first model is the base of the others.  It ``loads_adapters`` with
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``: see "LoRA Adapters" in its documentation.
    """

    owner = "vllm"
    loads_adapters = False

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path:
            case "GET", "/is_sleeping":
                return 200, {"is_sleeping": not self.loaded}
            case "POST", "/wake_up":
                self.orders.append((path, body))
                if self.broken:
                    return 500, {"error": {"message": self.broken}}
                self.loaded = [*self.models]
                return 200, None
            case "POST", "/sleep?level=1":
                self.orders.append((path, body))
                self.loaded = []
                return 200, None
            case "GET", "/v1/load_lora_adapter" if self.loads_adapters:
                return 405, {"detail": "Method Not Allowed"}
            case "POST", "/v1/load_lora_adapter" | "/v1/unload_lora_adapter":
                self.orders.append((path, body))
                return self._adapt(body["lora_name"], body.get("lora_path"))
            case _:
                pass
        return super().answer(method, path, body)

    def _adapt(self, name: str, path: str | None) -> tuple[int, Any]:
        if (path is None) != (name in self.models):
            said = f"The lora adapter '{name}' has already been loaded."
            return 400, {"error": {"message": said, "code": 400}}
        for names in (self.models, self.loaded):
            names.remove(name) if path is None else names.append(name)
        return 200, f"Success: LoRA adapter '{name}' changed successfully."

    def entry(self, model: str) -> Any:
        parent = None if model == self.models[0] else self.models[0]
        return {**super().entry(model), "root": model, "parent": parent}


KINDS = (Ollama, LmStudio, Router, SleepingVllm)


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """Serve a stand-in over HTTP; yield its base URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._respond(None)

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"] or 0))
            self._respond(json.loads(data) if data else None)

        def _respond(self, body: Any) -> None:
            target = urlsplit(self.path)
            path = f"{target.path}?{target.query}" if target.query else target.path
            status, value = stand_in.answer(self.command, path, body)
            text, type_ = json.dumps(value), "application/json"
            if path == "/v1/chat/completions":
                delta = {"role": "assistant", "content": f"I am {body['model']}"}
                choice = {"index": 0, "delta": delta, "finish_reason": "stop"}
                chunks = [{**HEAD, "choices": [choice]}]
                chunks.append({**HEAD, "choices": [], "usage": USAGE})
                events = [f"data: {json.dumps(each)}\n\n" for each in chunks]
                text, type_ = (
                    "".join([*events, "data: [DONE]\n\n"]),
                    "text/event-stream",
                )
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", type_)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(POLL,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
