"""The secrets of a run are nowhere but where they belong.

Each is a text of its own, which is looked for in all that the programs print and write,
and in every answer to a key that reads what belongs to all.
"""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from live.programs import KEY, PATIENCE, TOKEN, GatedModel, Pool, Programs, eventually
from models.tiny_answers import ANSWERS
from shoal.gateway.all_operations import OPERATIONS

PASSCODE, PEERS_PASSCODE = "passcode-4b1f0c9a7d2e8835", "passcode-c40d7e19ab36f582"
PASSWORD = "password-of-the-engine"
HOOK, HOOK_TOKEN, HOOK_SECRET = (
    "secret-path",
    "token-of-the-hook",
    "the-key-of-the-hook",
)
COMMIT = {
    "job_type": "LLM_INFER",
    "user_id": "ada",
    "payload": {"prompt": next(iter(ANSWERS)), "model": "tiny"},
}
IDS = {"run": "00" * 16, "digest": "00" * 32, "model": "tiny", "path": "x"}
IDS |= {"file_id": "x", "batch_id": "x", "name": "shoal:beagle"}


def sent(url: str, key: str, body: object = None) -> tuple[str, str]:
    """Return the head of an answer and what its body begins with, whatever it is."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        answer = urlopen(Request(url, data, headers), timeout=PATIENCE)
    except HTTPError as error:
        answer = error
    with answer:
        endless = answer.headers.get_content_type() == "text/event-stream"
        text = answer.read1() if endless else answer.read()
        return str(answer.headers), text.decode(errors="replace")


def made(pool: Pool, path: str, **body: object) -> dict[str, str]:
    """Return what was made, with its secret."""
    answer: dict[str, str] = json.loads(sent(pool.url + path, KEY, body)[1])
    return answer


@contextmanager
def mail_server() -> Iterator[int]:
    """Listen on a port that speaks no HTTP: errors about it are those of a library."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"220 mail\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_secrets_are_neither_printed_nor_kept_nor_shown(programs: Programs) -> None:
    model = GatedModel(-1)
    with closing(model), mail_server() as port:
        pool = programs.serve(
            *("--webhooks", "any", "--log-level", "debug"),
            *("--shoal-passcode", PASSCODE, "--tealenet-passcode", PEERS_PASSCODE),
        )
        reader = made(pool, "/admin/keys", name="reader", scope="monitor")["key"]
        token = made(pool, "/admin/tokens", name="lab")["token"]
        engine = f"http://operator:{PASSWORD}@127.0.0.1:{model.port}"
        flags = ("--engine", engine, "--log-level", "debug")
        worker = pool.join("beagle", *flags, token=token)
        printed = [worker.line() or "it has ended"]
        while '"joined"' not in printed[-1]:
            printed.append(worker.line() or "it has ended")
        url = f"http://127.0.0.1:{port}/{HOOK}?token={HOOK_TOKEN}"
        hook = {"url": url, "secret": HOOK_SECRET}
        job_id = made(pool, "/v1/jobs/commit/cheap", **COMMIT, webhook=hook)["job_id"]
        explained = f"{pool.url}/admin/jobs/{job_id}/explain"
        eventually(
            lambda: "not speak HTTP" in sent(explained, reader)[1], "it is tried"
        )
        answers = {
            each.path: sent(pool.url + each.path.format(id=job_id, **IDS), reader)
            for each in OPERATIONS
            if each.method == "GET"
        }
        for program in (worker, pool.program):
            assert program.terminate() == 0
            while (line := program.line()) is not None:
                printed.append(line)

    of_hook = {HOOK, HOOK_TOKEN, HOOK_SECRET}  # which is tried again: it is stored
    secrets = {KEY, TOKEN, PASSCODE, PEERS_PASSCODE, PASSWORD, reader, token, *of_hook}
    kept = {each for each in programs.folder.rglob("*") if each.is_file()}
    texts = {
        "standard output": "".join(printed),
        **{path: "".join(answer) for path, answer in answers.items()},
        **{each.name: each.read_bytes().decode(errors="replace") for each in kept},
    }
    found = {
        where: {each for each in secrets if each in text}
        for where, text in texts.items()
    }
    assert {where: each for where, each in found.items() if each} == {
        "api-key": {KEY},
        "shoal.db": of_hook,
    }
    assert {"serve", "join"} <= {name.partition("-")[0] for name in texts}  # their logs
