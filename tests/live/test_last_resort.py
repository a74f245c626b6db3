"""``shoal join --last-resort``, with a provider that is asked over HTTP."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import pytest

from harness.plain_http import NO_CERTIFICATES
from harness.slow_imports import openai
from live.programs import KEY, PATIENCE, Pool, Programs

MODEL = "gpt"
SECRET = "sk-of-the-provider"
HEAD = {"id": "chatcmpl-1", "created": 1, "model": MODEL}
USAGE = {"prompt_tokens": 1000, "completion_tokens": 100, "total_tokens": 1100}
COST = 1000 * 0.15 + 100 * 0.6  # micro-dollars


class _Provider(BaseHTTPRequestHandler):
    """OpenAI's API, for those who have the key."""

    protocol_version = "HTTP/1.1"
    asked: list[Any]

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        assert body["stream"], "workers always stream"
        delta = {"role": "assistant", "content": "from afar"}
        choice = {"index": 0, "delta": delta, "finish_reason": "stop"}
        chunk = {**HEAD, "object": "chat.completion.chunk", "choices": [choice]}
        last = {**chunk, "choices": [], "usage": USAGE}
        events = [f"data: {json.dumps(each)}\n\n" for each in (chunk, last)]
        self._send("".join([*events, "data: [DONE]\n\n"]), "text/event-stream")

    def _answer(self, value: Any) -> None:
        self._send(json.dumps(value), "application/json")

    def _send(self, text: str, type_: str) -> None:
        known = self.headers["Authorization"] == f"Bearer {SECRET}"
        data = text.encode() if known else b"{}"
        self.send_response(200 if known else 401)
        self.send_header("Content-Type", type_)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def provider() -> Iterator[tuple[str, list[Any]]]:
    """The URL of a provider, and what it was asked."""
    handler = type("Provider", (_Provider,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", handler.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()


def api(pool: Pool, method: str, path: str, body: object = None) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    asked = Request(pool.url + path, data, headers, method=method)
    with urlopen(asked, timeout=PATIENCE) as got:
        return json.load(got)


def ask(pool: Pool, key: str) -> Any:
    with openai.OpenAI(
        base_url=f"{pool.url}/v1",
        api_key=key,
        max_retries=0,
        timeout=PATIENCE,
        http_client=openai.DefaultHttpxClient(verify=NO_CERTIFICATES),
    ) as client:
        return client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )


def test_provider_answers_what_no_machine_can_for_keys_that_allow_it(
    programs: Programs, provider: tuple[str, list[Any]], tmp_path: Path
) -> None:
    url, asked = provider
    secret = tmp_path / "key"
    secret.write_text(f"{SECRET}\n")
    pool = programs.serve()
    hosted = ["--last-resort", "--price-per-million", "0.15,0.60"]
    engine = ["--engine", url, "--engine-key-file", str(secret)]
    pool.joined("cloud", *engine, *hosted)
    made = api(pool, "POST", "/admin/keys", {"name": "al", "hosted_after": 0})
    plain = api(pool, "POST", "/admin/keys", {"name": "bo"})

    with pytest.raises(openai.NotFoundError):
        ask(pool, plain["key"])
    assert asked == []
    answer = ask(pool, made["key"])

    assert answer.choices[0].message.content == "from afar"
    assert len(asked) == 1
    account = api(pool, "GET", "/admin/accounts/al")
    assert account["balance"] == -COST
    (worker,) = api(pool, "GET", "/admin/status")["workers"]
    assert worker["remark"].startswith("last resort: $0.150 and $0.600")
