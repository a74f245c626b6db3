"""Builders of logs and receipts, and the second verifier."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature

from shoal.domain.ids import JobId
from shoal.domain.money import Micros
from shoal.domain.receipts import SignedReceipt, Verdict
from shoal.ledger import bundle, consistency, merkle
from shoal.ledger.accounts import PriceList
from shoal.ledger.bundle import ReceiptBundle
from shoal.ledger.consistency import ConsistencyProof
from shoal.ledger.keys import Signer
from shoal.ledger.merkle import EMPTY_ROOT, Frontier
from shoal.ledger.notary import Notary, SealedBatch, SealedReceipt
from shoal.ledger.receipts import Claims
from shoal.ledger.worker_receipts import output_hash_of

COORDINATOR = Signer.from_seed(b"c" * 32)
WORKER = Signer.from_seed(b"w" * 32)
KEY = COORDINATOR.public_key
PRICES = PriceList(Micros(10_000), Micros(3_000), Micros(5_000), Micros(1_000))
"""Those of Dispatch's own coordinator."""

OUTPUT = '{"text":"Gr\u00fc\u00dfe","model":"m"}'
JOB = JobId("job-1")
AT = 1_770_638_405.123  # 2026-02-09T12:00:05.123Z

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parent / "vectors" / "receipts.json").read_text()
)
EXAMPLE = Path(__file__).parents[2] / "examples" / "verify_receipt.py"


def signed(
    signer: Signer = WORKER, output: str = OUTPUT, **changed: object
) -> SignedReceipt:
    """Return a worker's receipt, with some of its fields ``changed``."""
    fields = {
        "job_id": JOB,
        "provider_pubkey": signer.public_key.hex(),
        "output_hash": output_hash_of(output.encode()),
        "completed_at": "2026-02-09T12:00:05.000Z",
        "payment_ref": None,
    }
    body = json.dumps(fields | changed, separators=(",", ":")).encode()
    return SignedReceipt(body, signer.sign(body))


def claims(**changed: Any) -> Claims:
    """Return the claims of a job with a worker receipt, with fields ``changed``."""
    fields: dict[str, Any] = {
        "job_id": JOB,
        "worker": "w-1",
        "worker_key": WORKER.public_key.hex(),
        "output_hash": output_hash_of(OUTPUT.encode()),
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "price": 10_000,
        "fee": 500,
        "payment_ref": None,
        "at": "2026-02-09T12:00:05.000Z",
        "verdict": Verdict.VALID,
        "worker_receipt": signed(),
    }
    return Claims(**(fields | changed))


def unsigned(job_id: str = "job-2") -> Claims:
    """Return the claims of a job on a wire without receipts."""
    return claims(
        job_id=JobId(job_id),
        worker_key=None,
        verdict=Verdict.UNSIGNED,
        worker_receipt=None,
    )


class Log:
    """A coordinator's log with its stored nodes."""

    def __init__(self, signer: Signer = COORDINATOR) -> None:
        self.notary = Notary(signer, Frontier(), 0, EMPTY_ROOT)
        self.nodes: dict[tuple[int, int], bytes] = {}
        self.receipts: list[SealedReceipt] = []
        self.notes: dict[int, str] = {}

    def add(self, *batch: Claims) -> SealedBatch:
        sealed = self.notary.seal(batch, AT + self.notary.size)
        self.notary.commit(sealed)
        self.nodes |= {(level, at): hash for level, at, hash in sealed.nodes}
        self.receipts += sealed.receipts
        self.notes[sealed.checkpoint.size] = sealed.note
        return sealed

    def hash_at(self, level: int, position: int) -> bytes:
        return self.nodes[level, position]

    def bundle(self, index: int = 0, output: str | None = OUTPUT) -> ReceiptBundle:
        """Return a receipt's bundle, with the newest checkpoint."""
        size = self.notary.size
        logged = self.receipts[index]
        return ReceiptBundle(
            coordinator_key=self.notary.public_key.hex(),
            receipt=logged.body.decode(),
            signature=logged.signature,
            index=index,
            path=tuple(merkle.inclusion_path(index, size, self.hash_at)),
            checkpoint=self.notes[size],
            output=output,
        )

    def growth(self, first: int, second: int) -> ConsistencyProof:
        path = merkle.consistency_path(first, second, self.hash_at)
        return ConsistencyProof(self.notes[first], self.notes[second], tuple(path))


def grown(sizes: int) -> Log:
    """Return a log with a checkpoint for each of the first ``sizes``."""
    log = Log()
    log.add(claims())
    for number in range(2, sizes + 1):
        log.add(unsigned(f"job-{number}"))
    return log


def bundle_holds(data: bytes, key: bytes = KEY) -> bool:
    return all(check.ok for check in bundle.verify(data, key))


def growth_holds(data: bytes, key: bytes = KEY) -> bool:
    return all(check.ok for check in consistency.verify(data, key))


def second_verifier() -> Any:
    """Return the module of the verifier that shares no code with Shoal."""
    spec = importlib.util.spec_from_file_location("verify_receipt", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SECOND = second_verifier()


def second_steps(data: bytes, key: bytes = KEY) -> Iterator[str]:
    yield from SECOND.verify(data, key)


def second_holds(data: bytes, key: bytes = KEY) -> bool:
    """Return the second verifier's result; its errors count as in its own main."""
    try:
        for _ in second_steps(data, key):
            pass
    except (
        InvalidSignature,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ):
        return False
    return True
