"""Replays recorded conversations of job clients, workers and a coordinator."""

import base64
import json
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gateway.providers import (
    Provider,
    completion,
    connect,
    receipt_of,
    signed,
    to_json,
)
from gateway.serving import Pool, eventually
from protocols.dispatch.recorded import SIGNERS

Step: TypeAlias = Mapping[str, Any]  # as recorded; the fields depend on the step

HASH = "0" * 64
NETWORK = "eip155:10143"  # the original's; Shoal's is "shoal"

PATTERNS = {
    "<sqlite-utc-seconds>": r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d",
    "<iso-ms-Z>": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z",
}
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True, slots=True)
class Exchange:
    """A recorded request, the recorded response, and the current one."""

    method: str
    path: str
    status: int
    body: str
    our_status: int
    our_body: str


@dataclass(slots=True)
class Replay:
    """Replays steps in order, and waits for the expected effects of each.

    ``{{job0}}`` and the like are bound as they come.
    """

    pool: Pool
    stack: AsyncExitStack
    providers: dict[str, Provider] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)
    bound: dict[str, str] = field(default_factory=dict)
    _read: dict[str, int] = field(default_factory=dict)  # texts checked, by worker
    _signatures: dict[str, str] = field(default_factory=dict)  # current by recorded

    async def play(self, step: Step) -> None:
        """Replay a step, and check what workers received; record its exchanges."""
        await self._act(step)
        for name, texts in step.get("received", {}).items():
            for text in texts:
                await self._expect(name, text)

    async def _act(self, step: Step) -> None:
        match step:
            case {"open": name, "path": path}:
                joining = connect(self.pool, path)
                self.providers[name] = await self.stack.enter_async_context(joining)
            case {"conn": name, "send": text}:
                await self.providers[name].send(self.filled(text))
            case {"conn": name, "send_binary_utf8": text}:
                await self.providers[name].send(self.filled(text).encode())
            case {"complete": how}:
                text = self._completion(how)
                self._resign(step["sent"], text)
                await self.providers[how["conn"]].send(text)
            case {"submit": how}:
                await self.providers[how["conn"]].send(self._submission(how))
            case {"http": asked, "response": answered}:
                await self._ask(step, asked, answered)
            case {"close": name} | {"terminate": name}:
                socket = self.providers[name].socket
                if "close" in step:
                    await socket.close()
                else:
                    connection = socket._conn  # aiohttp itself sends a close frame
                    assert connection is not None
                    assert connection.transport is not None
                    connection.transport.abort()
                await eventually(lambda: not self.pool.hub.pool.workers)
            case {"wait_ms": _}:
                pass  # nothing here depends on timers
            case _:
                raise AssertionError(f"unknown step: {step}")

    def _completion(self, how: Step) -> str:
        """Return a completion, altered as in the recording."""
        signer, job_id, output = (
            SIGNERS[how["key"]],
            self.filled(how["job"]),
            how["output"],
        )
        message = json.loads(completion(job_id, output, signer))
        receipt = message["receipt"]
        match how.get("tamper"):
            case None:
                pass
            case "no_receipt":
                del message["receipt"], message["receipt_signature"]
            case "no_signature":
                del message["receipt_signature"]
            case "bad_sig":
                signature = bytearray(base64.b64decode(message["receipt_signature"]))
                signature[0] ^= 1
                text = base64.b64encode(signature).decode()
                message["receipt_signature"] = text
            case "no_output":
                del message["output"]
            case "receipt_unknown_job":
                receipt["job_id"] = "nope"
                message["receipt_signature"] = signed(receipt, signer)
            case "receipt_hash":
                receipt["output_hash"] = HASH
            case "wrong_output_hash":
                message["output_hash"] = "sha256:beef"
            case "output_swapped":
                message["output"] = {"forged": True}
            case "foreign_key":
                receipt["provider_pubkey"] = SIGNERS["B"].public_key.hex()
                message["receipt_signature"] = signed(receipt, SIGNERS["B"])
            case tamper:
                raise AssertionError(f"unknown: {tamper}")
        return to_json(message)

    def _resign(self, recorded: str, ours: str) -> None:
        """Bind a recorded signature to the current one, which covers another job id."""
        old, new = json.loads(recorded), json.loads(ours)
        if "receipt_signature" in old:
            self._signatures[old["receipt_signature"]] = new["receipt_signature"]

    def _submission(self, how: Step) -> str:
        job_id, signer = self.filled(how["job"]), SIGNERS[how["key"]]
        receipt, signature = receipt_of(job_id, how["output"], signer)
        message = {"receipt": receipt, "signature": signature}
        return to_json({"type": "receipt_submit"} | message)

    async def _ask(self, step: Step, asked: Step, answered: Step) -> None:
        body = asked["body"]
        if "body_recipe" in asked:
            body = '{"job_type":"TASK","user_id":"u1","payload":{"input":"%s"}}'
            body %= "x" * 110_000
        path = self.filled(asked["path"])
        async with self.pool.session.request(
            asked["method"],
            self.pool.url + path,
            data=None if body is None else self.filled(body),
            headers=asked["headers"],
            skip_auto_headers=["Content-Type"],
        ) as response:
            text = await response.text()
            assert response.content_type == "application/json", text
        recorded = answered["body"].replace(NETWORK, "shoal")
        for theirs, ours in self._signatures.items():
            recorded = recorded.replace(theirs, ours)
        self._bind(recorded, text)
        self.exchanges.append(
            Exchange(
                asked["method"],
                path,
                answered["status"],
                self.filled(recorded),
                response.status,
                text,
            )
        )

    def _bind(self, recorded: str, ours: str) -> None:
        """Bind the ids of a response that matches the recorded one."""
        if not recorded.startswith("{"):
            return
        expected, got = json.loads(recorded), json.loads(ours)
        for name, value in expected.items():
            found = _PLACEHOLDER.fullmatch(value) if isinstance(value, str) else None
            if found is not None and name in got:
                self.bound.setdefault(found[1], got[name])

    async def _expect(self, name: str, expected: str) -> None:
        provider, count = self.providers[name], self._read.get(name, 0)
        await eventually(lambda: len(provider.texts) > count)
        self._read[name] = count + 1
        text = provider.texts[count]
        self._bind(expected, text)
        assert text == self.filled(expected)

    def filled(self, text: str) -> str:
        """Insert bound values."""
        return _PLACEHOLDER.sub(lambda found: self.bound.get(found[1], found[0]), text)


def matches(expected: Any, ours: Any) -> bool:
    """Return whether a response has the recorded fields in order; more may follow."""
    match expected, ours:
        case dict(), dict():
            return [*expected] == [*ours][: len(expected)] and all(
                matches(value, ours[name]) for name, value in expected.items()
            )
        case list(), list():
            return len(expected) == len(ours) and all(map(matches, expected, ours))
        case str(), str() if expected in PATTERNS:
            return re.fullmatch(PATTERNS[expected], ours) is not None
        case _:
            return bool(expected == ours)
