"""`shoal demo`: its model answers slowly enough that a worker can be killed."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pexpect
import pytest

from live.programs import PATIENCE, TINY
from shoal.engines.gguf_files import DEMO_PACKAGE

DEMO = ("-m", "shoal", "demo")


@pytest.mark.skipif(
    find_spec(DEMO_PACKAGE) is None, reason="the demo's model is not installed"
)
@pytest.mark.skipif(sys.platform == "win32", reason="pexpect needs a pty")
def test_each_step_is_shown_while_it_is_done_at_a_terminal() -> None:
    terminal = pexpect.spawn(
        sys.executable,
        [*DEMO],
        encoding="utf-8",
        timeout=PATIENCE,
        dimensions=(24, 100),
        env={**os.environ, "TERM": "xterm"},
    )

    for shown in (
        "starting a coordinator …",
        "\x1b[2ma coordinator serves http://127.0.0.1:",
        "starting the worker otter …",
        "otter joined with smollm2-135m-instruct",
        "starting the worker beaver …",
        "beaver joined with smollm2-135m-instruct",
        "\x1b[1mWhy is the sea salty?",
        "\x1b[31m⟨",
        "was killed here⟩",
        "the coordinator's record of the job:",
        "back in the queue after attempt 1",
        "\x1b[32mThe answer is complete:",
        "starting the worker heron …",
        "heron joined with smollm2-135m-instruct, and signs receipts",
        "heron summarizes the answer …",
        "summarize → {",
        "ok  the coordinator signed the receipt",
        "\x1b[32mThe receipt is valid; verification needed only the public key.",
    ):
        terminal.expect_exact(shown)
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert terminal.exitstatus == 0


def test_question_with_a_short_answer_fails_with_advice_in_plain_lines() -> None:
    done = subprocess.run(
        [
            *(sys.executable, *DEMO),
            *("--model", f"tiny={TINY}", "--question", "ping"),
        ],
        capture_output=True,  # not a terminal
        text=True,
        timeout=PATIENCE,
        check=False,
    )

    assert done.returncode == 1
    assert "use a --question with a longer answer" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "starting a coordinator …"
    assert lines[2:6] == [
        "starting the worker otter …",
        "otter joined with tiny",
        "starting the worker beaver …",
        "beaver joined with tiny",
    ]
