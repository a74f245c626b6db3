"""Answers of all kinds, read by the SDKs for JavaScript, which check their schemas."""

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from clients.conftest import INSTALLED
from gateway.chat.varied_answers import shown_answers

SCRIPT = Path(__file__).with_name("node") / "strict_answers.mjs"
MOST = 2  # parts of an answer, beside the answer with all


@pytest.mark.long
def test_clients_for_javascript_find_nothing_wrong(tmp_path: Path) -> None:
    shown = [
        {
            name: value.decode() if isinstance(value, bytes) else value
            for name, value in asdict(answer).items()
        }
        for answer in shown_answers(MOST)
    ]
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps(shown), "utf-8")

    ran = subprocess.run(
        # On standard input, Node looks for modules where it is run.
        [INSTALLED / "bin" / "node", "--input-type=module", "-", answers],
        input=SCRIPT.read_text("utf-8"),
        capture_output=True,
        text=True,
        cwd=INSTALLED,
        env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]},
    )

    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["problems"] == []
    assert found["read"] > 2 * len(shown)
