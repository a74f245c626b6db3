"""``shoal join`` by the wire that identifies workers by a key, as a process."""

import json
import stat
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from live.programs import (
    KEY,
    PATIENCE,
    TINY,
    GatedModel,
    Pool,
    Program,
    Programs,
    eventually,
)
from models.tiny_answers import ANSWERS

STORY = "Tell me a story."
TINY_MODEL = ("--model", f"tiny={TINY}")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of the user whom the workers belong to."""
    folder = tmp_path / "user"
    monkeypatch.setenv("SHOAL_DATA_DIR", str(folder))
    return folder


@pytest.fixture
def pool(programs: Programs) -> Pool:
    return programs.serve()


def ask(pool: Pool, path: str, body: object = None) -> Any:
    """Return the coordinator's answer, also a refusal."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(pool.url + path, data, headers), timeout=PATIENCE) as got:
            return json.load(got)
    except HTTPError as error:
        with error:
            return json.load(error)


def commit(pool: Pool, job_type: str, privacy: str = "PUBLIC", **payload: str) -> str:
    body = {
        "job_type": job_type,
        "user_id": "u1",
        "privacy_class": privacy,
        "payload": payload,
    }
    job: str = ask(pool, "/v1/jobs/commit/fast", body)["job_id"]
    return job


def ended(pool: Pool, job: str) -> Any:
    """Wait for a job's end; return it."""
    ends = ("completed", "failed")
    eventually(
        lambda: ask(pool, f"/v1/jobs/{job}")["status"] in ends, f"{job} has ended"
    )
    return ask(pool, f"/v1/jobs/{job}")


def joined(pool: Pool, name: str, *flags: str) -> tuple[Program, dict[str, Any]]:
    worker = pool.join(name, "--wire", "dispatch", *(flags or TINY_MODEL))
    return worker, worker.event("joined")


def test_worker_runs_and_signs_chats_and_tasks(pool: Pool) -> None:
    _, said = joined(pool, "otter")

    chat = ended(pool, commit(pool, "LLM_INFER", prompt="ping"))
    task = ended(
        pool, commit(pool, "TASK", task_type="extract_json", input='so {"a": 1}')
    )

    assert chat["result"] == {"text": ANSWERS["ping"], "model": "tiny"}
    assert task["result"] == {"extracted": [{"a": 1}], "count": 1}
    for job in (chat, task):
        assert job["receipt"]["provider_pubkey"] == said["public_key"]
        assert job["receipt"]["verified"] is True


def test_key_belongs_to_its_name(pool: Pool, data: Path) -> None:
    first, before = joined(pool, "otter")
    first.terminate()

    _, after = joined(pool, "otter")
    _, other = joined(pool, "beaver")

    assert before["public_key"] == after["public_key"] != other["public_key"]
    eventually(lambda: len(pool.workers()) == 2, "neither took the other's place")
    files = sorted((data / "identities").iterdir())
    assert [file.name for file in files] == ["beaver.json", "otter.json"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_trusted_worker_gets_private_jobs(programs: Programs) -> None:
    pool = programs.serve("--dispatch-trust-unproven")
    code = ask(pool, "/v1/trust/create", {"user_id": "u1"})["pairing_code"]
    worker, _ = joined(pool, "otter", *TINY_MODEL, "--pairing-code", code)
    assert "u1" in worker.event("paired")["reason"]

    job = ended(pool, commit(pool, "LLM_INFER", "PRIVATE", prompt="ping"))

    assert job["result"]["text"] == ANSWERS["ping"]
    assert job["privacy_class"] == "PRIVATE"


def test_invalid_pairing_code_is_reported_and_the_worker_stays(pool: Pool) -> None:
    worker, _ = joined(pool, "otter", *TINY_MODEL, "--pairing-code", "000000")

    assert "no such code" in worker.event("unpaired")["reason"]
    job = ended(pool, commit(pool, "LLM_INFER", prompt="ping"))
    assert job["status"] == "completed"


def test_one_model_is_offered_and_omitted_ones_are_named(pool: Pool) -> None:
    models = (*TINY_MODEL, "--model", f"other={TINY}")

    worker, said = joined(pool, "otter", *models)

    assert said["model"] == "tiny"
    assert "only tiny is offered" in worker.errors
    assert "another (other), join with --model under another --name" in worker.errors


def test_stopped_worker_finishes_its_job(pool: Pool, slow_model: GatedModel) -> None:
    worker, _ = joined(pool, "otter", *slow_model.flags)
    job = commit(pool, "LLM_INFER", prompt=STORY)
    eventually(lambda: slow_model.requests, "the model is asked")

    worker.process.terminate()
    worker.event("leaving")
    slow_model.go_on.set()

    assert ended(pool, job)["result"]["text"] == ANSWERS[STORY]
    assert worker.wait() == 0


def test_job_of_a_killed_worker_is_requeued(pool: Pool, slow_model: GatedModel) -> None:
    worker, _ = joined(pool, "otter", *slow_model.flags)
    job = commit(pool, "LLM_INFER", prompt=STORY)
    eventually(lambda: slow_model.requests, "the model is asked")

    worker.kill()
    _, said = joined(pool, "beaver")

    done = ended(pool, job)
    assert done["result"]["text"] == ANSWERS[STORY]
    assert done["receipt"]["provider_pubkey"] == said["public_key"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--provider-type", "TOASTER"), "--provider-type TOASTER: expected DESKTOP"),
        (
            ("--wire", "grandsage", "--pairing-code", "A"),
            "grandsage has no pairing codes",
        ),
        (("--identity", "/proc/none/key"), "--identity"),
        (("--price", "ten"), "--price: expected dollars such as $0.010"),
        (("--privacy", "secret"), "--privacy secret: expected any, public or"),
    ],
)
def test_wrong_argument_is_an_error_that_names_it(
    programs: Programs, flags: tuple[str, ...], said: str
) -> None:
    worker = programs.run(
        "join", "http://127.0.0.1:1", "--wire", "dispatch", *TINY_MODEL, *flags
    )

    assert worker.wait() == 1
    assert said in worker.errors
    assert "Traceback" not in worker.errors
