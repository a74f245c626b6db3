"""``shoal receipts verify --request``: which question an answer belongs to."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ledger.builders import COORDINATOR, JOB, KEY, OUTPUT, Log, claims
from shoal.cli.main import main
from shoal.domain.work import Chat
from shoal.ledger import bundle, consistency
from shoal.ledger.bundle import SaltedRequest
from shoal.ledger.requests import request_hash_of, request_of, request_salt

BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "Why?"}],
    "temperature": 0.5,
    "stream": True,
}
ASKED = request_of(Chat("m", ({"role": "user", "content": "Why?"},), temperature=0.5))
SALT = request_salt(COORDINATOR, JOB)


@pytest.fixture
def log() -> Log:
    made = Log()
    made.add(claims(request_hash=request_hash_of(SALT, ASKED)))
    return made


def verified(
    folder: Path, data: bytes, request: bytes, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Verify a file with a request; return the status, the last step and its reason."""
    (folder / "bundle.json").write_bytes(data)
    (folder / "body.json").write_bytes(request)
    words = ["receipts", "verify", str(folder / "bundle.json"), "--json"]
    words += ["--key", KEY.hex(), "--request", str(folder / "body.json")]
    status = main(words)
    last = json.loads(capsys.readouterr().out)["steps"][-1]
    return status, last["step"], last["wrong"] or ""


@pytest.mark.parametrize(
    "request_",
    [
        json.dumps(BODY).encode(),
        json.dumps(BODY, indent=2).encode() + b"\n",
        json.dumps(
            {"custom_id": "1", "method": "POST", "url": "/v1/x", "body": BODY}
        ).encode(),
        ASKED,
        ASKED + b"\n",
    ],
    ids=["body", "indented", "line of a batch", "canonical", "canonical line"],
)
@pytest.mark.parametrize("text", [None, ASKED.decode()])
def test_request_of_the_receipt_is_verified(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    log: Log,
    request_: bytes,
    text: str | None,
) -> None:
    file = replace(log.bundle(0, OUTPUT), request=SaltedRequest(SALT, text))

    status, _, wrong = verified(tmp_path, bundle.write(file), request_, capsys)

    assert (status, wrong) == (0, "")


@pytest.mark.parametrize(
    "request_",
    [
        json.dumps(BODY | {"temperature": 0.6}).encode(),
        json.dumps(BODY | {"seed": 1}).encode(),
        b"Why?",
        b"",
    ],
)
def test_another_request_is_not_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log: Log, request_: bytes
) -> None:
    file = replace(log.bundle(0, OUTPUT), request=SaltedRequest(SALT))

    status, step, wrong = verified(tmp_path, bundle.write(file), request_, capsys)

    assert (status, step) == (1, "the request matches the receipt")
    assert "the given request is another" in wrong


def test_file_without_the_salt_says_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log: Log
) -> None:
    data = bundle.write(log.bundle(0, OUTPUT))

    status, _, wrong = verified(tmp_path, data, ASKED, capsys)

    assert status == 1
    assert "export it with the request" in wrong


def test_proof_of_growth_is_about_no_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], log: Log
) -> None:
    log.add(claims())
    file = tmp_path / "growth.json"
    file.write_bytes(consistency.write(log.growth(1, 2)))
    words = ["receipts", "verify", str(file), "--key", KEY.hex(), "--request"]

    assert main([*words, str(file)]) == 1

    assert "--request: only for a file written by export" in capsys.readouterr().err
