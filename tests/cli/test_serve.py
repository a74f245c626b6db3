"""Arguments of the serve command."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.app.server import RunningCoordinator
from shoal.cli.main import main
from shoal.cli.pool import serve
from shoal.cli.pool.serve import command
from shoal.config import ServeConfig

SECTIONS = {
    "serve: this coordinator": "--queue-max JOBS",
    "tealenet: Macs, other pools and relays": "--tealenet-passcode PASSCODE",
    "macfleet: MacFleet's nodes": "--macfleet-slots N",
    "grandsage: GrandSage's nodes": "--grandsage-token TOKEN",
    "dispatch: Dispatch's phones and desktops": "--dispatch-open",
    "x402: payments for jobs": "--x402-facilitator URL",
}
"""The headings of the long help, and an option of each."""


def test_short_help_has_what_a_first_user_needs() -> None:
    short = CliRunner().invoke(command, ["--help"]).output

    for option in ("--host", "--port", "--tls", "--data-dir", "--api-key", "--config"):
        assert f"  {option} " in short
    assert len([line for line in short.splitlines() if line.startswith("  --")]) <= 20
    assert not [option for option in SECTIONS.values() if option in short]


def test_long_help_has_a_section_for_each_wire_that_says_what_it_is() -> None:
    everything = CliRunner().invoke(command, ["--help-all"]).output

    for heading, option in SECTIONS.items():
        _, _, below = everything.partition(f"\n{heading}:\n")
        assert f"\n  {option}" in "\n" + below.partition("\n\n")[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--log-level", "loud"], "'debug', 'info', 'warning', 'error'"),
        (["--prot", "1"], "--port"),
        (["4010"], "unexpected extra argument"),
    ],
)
def test_wrong_arguments_are_refused_with_a_hint(
    arguments: list[str], said: str
) -> None:
    refused = CliRunner().invoke(command, arguments)

    assert refused.exit_code == 2
    assert said in refused.output


def test_data_folder_that_cannot_be_made_is_an_error_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folders = [tmp_path / "file" / "data"]
    if sys.platform == "linux":
        folders.append(Path("/proc/shoal"))  # 0 bytes are free there, as on a full disk
    for folder in folders:
        assert main(["serve", "--port", "0", "--data-dir", str(folder)]) == 1

        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"shoal serve: --data-dir {folder}: ")
        assert "are free" not in said


async def no_invitation() -> str:
    raise AssertionError("no command is shown")


def test_log_says_where_the_secrets_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = RunningCoordinator(
        *(None, "http://127.0.0.1:1", 1, None, {}),  # type: ignore[arg-type]  # no hub
        api_key="sk-s3cret",
        invite=no_invitation,
        pinned_key="sk-s3cret.sha256-x",
        authority=None,
        dashboard="http://127.0.0.1:1/#signin=s3cret",
    )

    serve._announce(running, ServeConfig(data_dir=tmp_path), "", None, as_json=False)

    printed = capsys.readouterr().out
    assert "s3cret" not in printed
    assert f"API key    in {tmp_path / 'api-key'}\n" in printed
    for name in ("dashboard", "join-line"):
        assert f"`shoal {name} --data-dir {tmp_path}`" in printed
