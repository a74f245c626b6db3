"""`shoal run` at a coordinator of another machine, which gets no worker."""

import asyncio

import pytest

from cli.coordinators import Sites
from shoal.cli.main import main


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("qwen38b", "did you mean qwen3-8b? to add it, run `shoal join` "),
        ("gemma", "its models: qwen3-8b, tiny; to add it, run `shoal join` "),
    ],
)
async def test_what_the_other_machines_pool_has_is_said(
    sites: Sites,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: str,
    said: str,
) -> None:
    monkeypatch.setattr("shoal.cli.use.run.is_own_host", lambda host: False)
    url = await sites({"/v1/models": {"data": [{"id": "qwen3-8b"}, {"id": "tiny"}]}})
    command = ["run", model, "hi", "--url", url, "--api-key", "sk-test"]

    assert await asyncio.to_thread(main, command) == 1

    assert f"has no model {model!r}; {said}" in capsys.readouterr().err
