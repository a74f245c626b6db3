"""The dashboard's modules that need no browser, run by Node.js: ``modules/*.test.js``.

The proofs that they verify are written here, with what Shoal's own verifier says.
"""

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shoal
from clients.conftest import INSTALLED
from ledger.builders import (
    AT,
    COORDINATOR,
    KEY,
    WORKER,
    Log,
    claims,
    grown,
    signed,
    unsigned,
)
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.ledger import bundle, checkpoint, consistency, merkle, receipts
from shoal.ledger.bundle import ReceiptBundle, SaltedRequest
from shoal.ledger.receipts import Claims
from shoal.ledger.requests import request_hash_of

MODULES = Path(__file__).parent / "modules"
ALIEN = signed(provider_pubkey=WORKER.public_key.hex().upper())
SORTED_BODY = json.dumps(
    json.loads(signed().body), separators=(",", ":"), sort_keys=True
).encode()


@pytest.mark.long
def test_modules_on_node(tmp_path: Path) -> None:
    package = tmp_path / "node_modules" / "shoal"
    package.parent.mkdir()
    package.symlink_to(Path(shoal.__file__).parent / "dashboard_files")
    for test in MODULES.glob("*.test.js"):
        (tmp_path / test.name.replace(".js", ".mjs")).write_text(test.read_text())
    (tmp_path / "proofs.json").write_text(json.dumps([*proofs()]))
    (tmp_path / "logs.json").write_text(json.dumps(logs()))

    ran = subprocess.run(
        [INSTALLED / "bin" / "node", "--preserve-symlinks", "--test"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "SHOAL_CASES": str(tmp_path)},
        capture_output=True,
        text=True,
    )

    assert ran.returncode == 0, ran.stdout


def proofs() -> Iterator[dict[str, Any]]:
    """Yield files with the steps that they pass, and the one that they fail."""
    log = grown(7)
    for index in range(7):
        yield proof(f"receipt {index} of 7", bundle.write(log.bundle(index)))
    yield proof("without its output", bundle.write(grown(3).bundle(output=None)))
    for name, given in signed_by_workers():
        only = Log()
        only.add(given, unsigned())
        yield proof(f"worker's receipt: {name}", bundle.write(only.bundle()))
    for name, data in altered():
        yield proof(name, data)
    for name, file in with_requests():
        yield proof(name, bundle.write(file))
    another = WORKER.public_key
    yield proof("the key of another", bundle.write(grown(2).bundle()), another)
    yield proof("no key", bundle.write(grown(2).bundle()), b"")
    for first in range(1, 8):
        yield growth(
            f"growth from {first} to 7", consistency.write(log.growth(first, 7))
        )
    proved = log.growth(3, 7)
    for name, changed in (
        ("growth backwards", replace(proved, first=proved.second, second=proved.first)),
        ("growth of a part", replace(proved, path=proved.path[:-1])),
        ("growth and more", replace(proved, path=(*proved.path, bytes(32)))),
        (
            "growth of another log",
            replace(proved, first=Log(WORKER).add(claims()).note),
        ),
        ("growth of itself", log.growth(7, 7)),
    ):
        yield growth(name, consistency.write(changed))


def logs() -> dict[str, Any]:
    """Return the checkpoints of a log and of a fork of it, with proofs of growth."""
    log, fork = grown(7), grown(2)
    for number in range(3, 8):
        fork.add(unsigned(f"other-{number}"))

    def growths(of: Log) -> dict[str, str]:
        return {
            f"{first} {second}": consistency.write(of.growth(first, second)).decode()
            for first in range(1, 8)
            for second in range(first, 8)
        }

    return {
        "key": KEY.hex(),
        "notes": log.notes,
        "growths": growths(log),
        "forked": {"notes": fork.notes, "growths": growths(fork)},
        "alien": Log(WORKER).add(claims()).note,
    }


def signed_by_workers() -> Iterator[tuple[str, Claims]]:
    good = signed()
    for name, verdict, receipt in (
        ("valid", Verdict.VALID, good),
        ("its key in capitals", Verdict.VALID, ALIEN),
        ("signed sorted", Verdict.VALID, SignedReceipt(
            good.body, WORKER.sign(SORTED_BODY))),
        ("missing", Verdict.MISSING, None),
        ("no text", Verdict.MALFORMED, SignedReceipt(b"\xff", b"")),
        ("no claims", Verdict.MALFORMED, SignedReceipt(b"{}", b"")),
        ("a list", Verdict.MALFORMED, SignedReceipt(b"[]", b"")),
        ("too deep", Verdict.MALFORMED, SignedReceipt(b"[" * 200, b"")),
        ("another job", Verdict.WRONG_JOB, signed(job_id="other")),
        ("another worker", Verdict.WRONG_WORKER, signed(COORDINATOR)),
        ("another output", Verdict.WRONG_OUTPUT, signed(output="{}")),
        ("no signature", Verdict.BAD_SIGNATURE, SignedReceipt(good.body, bytes(64))),
        ("called valid", Verdict.VALID, SignedReceipt(good.body, bytes(64))),
        ("called bad", Verdict.BAD_SIGNATURE, good),
        ("none called valid", Verdict.VALID, None),
    ):  # fmt: skip
        yield name, claims(verdict=verdict, worker_receipt=receipt)
    yield (
        "of nobody",
        claims(
            worker_key=None,
            worker_receipt=signed(provider_pubkey="none"),
            verdict=Verdict.WRONG_WORKER,
        ),
    )
    low = (1).to_bytes(32, "little").hex()
    yield (
        "a key of small order",
        claims(
            worker_key=low,
            worker_receipt=signed(provider_pubkey=low),
            verdict=Verdict.VALID,
        ),
    )


def with_requests() -> Iterator[tuple[str, ReceiptBundle]]:
    salt, text = b"s" * 16, '{"kind":"chat","messages":[],"model":"m"}'
    named = request_hash_of(salt, text.encode())
    log = Log()
    log.add(claims(request_hash=named), claims(request_hash="sha256:" + "0" * 64))
    good = replace(log.bundle(), request=SaltedRequest(salt, text))
    yield "names its request", log.bundle()
    yield "with its request", good
    yield "with a salt", replace(good, request=SaltedRequest(salt))
    yield "with another salt", replace(good, request=SaltedRequest(bytes(16), text))
    yield "with another request", replace(good, request=SaltedRequest(salt, text + " "))
    other = log.bundle(1)
    yield "named another request", replace(other, request=good.request)
    yield "of an earlier version", replace(grown(2).bundle(), request=good.request)
    body = receipts.body(claims(request_hash=named), 0, merkle.EMPTY_ROOT)
    for name, said in (
        ("of the first version with a request", body.replace(b'n":2', b'n":1')),
        ("of the third version", body.replace(b'n":2', b'n":3')),
        ("with a short hash", body.replace(named.encode(), named[:-1].encode())),
    ):
        yield f"a receipt {name}", forged(said)


def altered() -> Iterator[tuple[str, bytes]]:
    log = grown(3)
    good = log.bundle(1)
    data = bundle.write(good)
    yield "empty", b""
    yield "null", b"null\n"
    yield "an empty object", b"{}\n"
    yield "not UTF-8", b"\xff"
    yield "a byte order mark", b"\xef\xbb\xbf" + data
    yield "brackets", b"[" * 100_000
    yield "without its line end", data[:-1]
    yield "two line ends", data + b"\n"
    yield "a float", data.replace(b'"index":1', b'"index":1.0')
    yield "one more field", data.replace(b'"index":1', b'"index":1,"more":1')
    yield "a field twice", data.replace(b'"index":1', b'"index":1,"index":1')
    yield "the next version", data.replace(b'"version":1}', b'"version":2}')
    yield "escaped", data.replace(b"/", b"\\/")
    for index in (-1, 0, 2, 3, 2**53 - 1):
        yield f"index {index}", bundle.write(replace(good, index=index))
    yield "another output", bundle.write(replace(good, output="{}"))
    yield "an empty output", bundle.write(replace(good, output=""))
    other = replace(good, checkpoint=checkpoint.make(WORKER, 2, bytes(32), AT))
    yield "a checkpoint of another", bundle.write(other)
    older = replace(log.bundle(2), checkpoint=log.notes[2])
    yield "an older checkpoint", bundle.write(older)
    body = receipts.body(claims(), 0, merkle.EMPTY_ROOT)
    unprefixed = replace(good, signature=COORDINATOR.sign(body))
    yield "signed without the prefix", bundle.write(unprefixed)
    for name, said in (
        ("of another type", b'{"type":"shoal/other"}'),
        ("after its checkpoint", receipts.body(claims(), 1, merkle.EMPTY_ROOT)),
        ("not in order", body.replace(b'{"at"', b'{ "at"')),
        ("at no time", body.replace(b"-09T12", b"-39T12")),
        ("with a fee beyond its price", body.replace(b'"fee":500', b'"fee":50000')),
    ):
        yield f"a receipt {name}", bundle.write(forged(said))


def forged(body: bytes) -> ReceiptBundle:
    """Return the bundle of a coordinator that signs anything."""
    return ReceiptBundle(
        KEY.hex(),
        body.decode(),
        COORDINATOR.sign(receipts.PREFIX + body),
        0,
        (),
        checkpoint.make(COORDINATOR, 1, merkle.leaf_hash(body), AT),
    )


def proof(name: str, data: bytes, key: bytes = KEY) -> dict[str, Any]:
    steps = bundle.verify(data, key)
    return {
        "name": name,
        "data": base64.b64encode(data).decode(),
        "key": key.hex(),
        "steps": [[each.step.name, each.ok] for each in steps],
    }


def growth(name: str, data: bytes) -> dict[str, Any]:
    steps = consistency.verify(data, KEY)
    return proof(name, data) | {"steps": [[each.step.name, each.ok] for each in steps]}
