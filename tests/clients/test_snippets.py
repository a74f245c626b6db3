"""Every snippet of the page of clients, run as it stands there."""

import os
import subprocess
from pathlib import Path

import pytest

from clients import page
from clients.conftest import INSTALLED
from clients.page import Snippet
from live.programs import KEY, Pool

COMMANDS = {
    "python": (INSTALLED / "bin" / "python", "-"),
    "js": (INSTALLED / "bin" / "node", "--input-type=module", "-"),
    "sh": ("bash", "-e"),
}
"""What runs a program that comes on standard input, by its language."""


@pytest.mark.long
@pytest.mark.parametrize(
    "snippet", page.snippets(), ids=lambda snippet: snippet.section
)
def test_snippet_prints_what_the_page_says(
    snippet: Snippet, pool: Pool, tmp_path: Path
) -> None:
    code = snippet.code.replace(page.URL, pool.url).replace(page.KEY, KEY)

    ran = subprocess.run(
        COMMANDS[snippet.language],
        input=code,
        capture_output=True,
        text=True,
        cwd=INSTALLED,  # where Node looks for modules
        # No settings of the user who runs the tests.
        env={
            "HAYSTACK_TELEMETRY_ENABLED": "False",
            "HOME": str(tmp_path),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PATH": os.environ["PATH"],
            "TIKTOKEN_CACHE_DIR": os.environ["TIKTOKEN_CACHE_DIR"],
        },
    )

    assert ran.returncode == 0, ran.stderr
    assert snippet.printed(ran.stdout), ran.stdout
