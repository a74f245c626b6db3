"""The demo's second half: a job for whoever is there, and a receipt to verify."""

import argparse
import json
from collections.abc import Callable

from shoal.cli import api
from shoal.domain.errors import ShoalError
from shoal.domain.money import dollars
from shoal.ledger import bundle, receipts
from shoal.ledger.receipts import Claims

WAIT = 60  # seconds for the job to be done


class NotProved(ShoalError):
    """The job or its receipt is not as it should be."""


def job_with_receipt(
    ask: argparse.Namespace, text: str, say: Callable[[str], None]
) -> None:
    """Have a text summarized, and verify the receipt with nothing but the public key.

    Raises NotProved, ApiError.
    """
    task = {"task_type": "summarize", "input": text}
    wanted = {"job_type": "TASK", "payload": task, "user_id": "demo"}
    job_id = api.ask(ask, "/v1/jobs/commit/cheap", wanted)["job_id"]
    job = api.ask(ask, f"/v1/jobs/{job_id}?wait={WAIT}")
    if job["status"] != "completed":
        raise NotProved(f"the task is {job['status']}: {job['result']}")
    say(f"  summarize → {json.dumps(job['result'], ensure_ascii=False)}")
    public_key = bytes.fromhex(api.ask(ask, "/v1/log")["public_key"])
    file = api.fetch(ask, f"/v1/receipts/{job_id}")
    # From here on nobody is asked anything.
    for check in bundle.verify(file, public_key):
        say(f"  {'ok' if check.ok else 'FAILED'}  {check.step.value}")
        if not check.ok:
            raise NotProved(f"the receipt does not hold: {check.wrong}")
    claims = receipts.read(bundle.read(file).receipt.encode()).claims
    say(f"  {claims.verdict.value}; it earned {_earned(claims)}")


def _earned(claims: Claims) -> str:
    return f"{dollars(claims.price - claims.fee)} of {dollars(claims.price)}"
