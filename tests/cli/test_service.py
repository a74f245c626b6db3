"""``shoal service``: what systemd, launchd and Windows are given."""

import json
import os
import plistlib
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import click
import pytest

from shoal.cli.main import main
from shoal.cli.pool.join import command as join
from shoal.cli.pool.serve import command as serve
from shoal.cli.pool.service import define_service, environment_text, schtasks_command
from shoal.cli.pool.service.managers import Launchd, launchd_agent, systemd_unit
from shoal.domain.errors import ConfigError

TOKEN = "9f2c71d4e8a6b03597c1d5e2"
ODD = """a"b\\c$d`e'f%g h"""

posix = pytest.mark.skipif(sys.platform == "win32", reason="it has no such services")
linux = pytest.mark.skipif(sys.platform != "linux", reason="it has no systemd")

# Stands for systemctl and launchctl, which need a session of a user.
RECORDER = """#!/bin/sh
echo "$(basename "$0") $*" >> "{calls}"
[ -e "{broken}" ] && {{ echo "Failed to connect to bus" >&2; exit 1; }}
case "$*" in
    *show*) echo active ;;
    print*) [ -e "{loaded}" ] || exit 113; echo "	state = running" ;;
    bootstrap*) touch "{loaded}" ;;
    bootout*) rm "{loaded}" ;;
esac
"""


class Home:
    """A home folder with programs that record how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._calls = folder / "calls"
        self._broken = folder / "broken"
        text = RECORDER.format(
            calls=self._calls, broken=self._broken, loaded=folder / "loaded"
        )
        self.programs = folder / "programs"
        self.programs.mkdir()
        for name in ("systemctl", "launchctl"):
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)
        self.config = folder / "config" / "shoal"

    @property
    def unit(self) -> Path:
        return self.folder / "config" / "systemd" / "user" / "shoal-serve.service"

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def break_programs(self) -> None:
        self._broken.touch()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = Home(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PATH", f"{home.programs}:{os.environ['PATH']}")
    monkeypatch.setattr("shoal.cli.pool.service.USER_FILE", home.config / "shoal.toml")
    return home


DATABASE = "postgresql://shoal:wild@db.example.com/shoal"


def test_secrets_become_variables_and_the_rest_stays() -> None:
    arguments = ["--port", "0", "--no-tealenet-lan", "--peer", "a:1", "--peer", "b:2"]
    secrets = ["--api-key", "sk-1", "--tealenet-passcode=wild", "--store", DATABASE]

    service = define_service(serve, [*arguments, *secrets, "--drain", "90"], {})

    assert service.words[-6:] == [
        *("serve", "--port=0", "--peer=a:1", "--peer=b:2", "--drain=90"),
        "--no-tealenet-lan",
    ]
    assert service.variables == {
        "SHOAL_API_KEY": "sk-1",
        "SHOAL_STORE": DATABASE,
        "SHOAL_TEALENET_PASSCODE": "wild",
    }
    assert service.folder == Path.cwd()
    assert service.stop_timeout == 120.0


def test_variables_of_the_shell_are_kept_unless_an_argument_overrides_them() -> None:
    environment = {
        "SHOAL_TOKEN": "theirs",
        "SHOAL_NAME": "otter",
        "SHOAL_ENGINE_KEY_FILE": "/run/key",
        "SHOAL_DATA_DIR": "/data",
        "SHOAL_QUEUE_MAX": "of serve",
        "PATH": "/bin",
    }

    service = define_service(join, ["http://h:1", "--token", "mine"], environment)

    assert service.words[-2:] == ["join", "http://h:1"]
    assert service.variables == {
        "SHOAL_TOKEN": "mine",
        "SHOAL_NAME": "otter",
        "SHOAL_ENGINE_KEY_FILE": "/run/key",
        "SHOAL_DATA_DIR": "/data",
    }


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    with pytest.raises(click.UsageError, match="--prot"):
        define_service(serve, ["--prot", "1"], {})
    with pytest.raises(ConfigError, match="SHOAL_NAME: expected a single line"):
        define_service(serve, [], {"SHOAL_NAME": "two\nlines"})


@posix
def test_shells_read_the_variables_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text(environment_text({"ODD": ODD}))

    read = subprocess.check_output(["sh", "-c", f'. {file}; printf %s "$ODD"'])

    assert read.decode() == ODD


@linux
def test_unit_is_written_and_started(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["service", "install", "serve", "--", "--join-token", TOKEN]) == 0

    printed = capsys.readouterr().out
    environment = home.config / "serve.env"
    assert environment.read_text() == f'SHOAL_JOIN_TOKEN="{TOKEN}"\n'
    assert stat.S_IMODE(environment.stat().st_mode) == 0o600
    assert f"EnvironmentFile={environment}\n" in home.unit.read_text()
    assert TOKEN not in home.unit.read_text() + printed
    assert home.calls == [
        "systemctl --user daemon-reload",
        "systemctl --user enable shoal-serve.service",
        "systemctl --user restart shoal-serve.service",
    ]
    assert f"started {home.unit}" in printed
    assert "journalctl --user --unit shoal-serve" in printed


@linux
def test_service_that_is_installed_again_forgets_what_it_had(home: Home) -> None:
    install = ["service", "install", "serve", "--no-start", "--json"]
    assert main([*install, "--", "--join-token", TOKEN, "--port", "5"]) == 0
    assert main(install) == 0

    assert not (home.config / "serve.env").exists()
    assert "--port" not in home.unit.read_text()
    assert home.calls == []


@linux
def test_state_is_shown_and_the_service_removed(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["service", "install", "serve", "--", "--join-token", TOKEN]) == 0
    capsys.readouterr()

    assert main(["service", "status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["data"]
    assert [(each["service"], each["state"]) for each in shown] == [
        ("serve", "active"),
        ("join", "not installed"),
    ]

    assert main(["service", "uninstall", "serve"]) == 0
    assert main(["service", "uninstall", "serve"]) == 1
    assert "the service serve is not installed" in capsys.readouterr().err
    assert not home.unit.exists()
    assert not (home.config / "serve.env").exists()
    assert "systemctl --user disable --now shoal-serve.service" in home.calls


@linux
def test_without_a_session_the_next_step_is_named(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    home.break_programs()

    assert main(["service", "install", "serve"]) == 1
    said = capsys.readouterr().err
    assert "Failed to connect to bus" in said
    assert "systemctl --user enable --now shoal-serve" in said
    assert main(["service", "status", "serve"]) == 0
    assert "unknown" in capsys.readouterr().out
    assert main(["service", "uninstall", "serve"]) == 1
    assert "is deleted" in capsys.readouterr().err
    assert not home.unit.exists()


@linux
@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd")
def test_systemd_finds_no_fault_in_the_units(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path), "PATH": os.environ["PATH"]}
    (tmp_path / "my file").touch()
    for command, arguments in (
        (serve, ["--share", f"{ODD}=/x", "--api-key", "k"]),
        (join, ["http://h:1", "--model", "q*"]),
    ):
        unit = tmp_path / f"shoal-{command.name}.service"
        service = define_service(command, arguments, {})
        unit.write_text(systemd_unit(service, tmp_path / "my file"))

        done = subprocess.run(
            ["systemd-analyze", "verify", "--user", str(unit)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

        assert (done.returncode, done.stderr) == (0, "")


def test_announcement_with_its_keys_is_in_no_journal() -> None:
    def unit(command: click.Command) -> str:
        return systemd_unit(define_service(command, [], {}), None)

    assert "StandardOutput=null\n" in unit(serve)
    assert "StandardOutput" not in unit(join)
    assert "EnvironmentFile" not in unit(serve)


@posix
def test_agent_of_macos_starts_the_command_with_its_variables(tmp_path: Path) -> None:
    service = define_service(join, ["http://h:1", "--token", ODD], {})
    file = tmp_path / "my env"
    file.write_text(environment_text(service.variables))

    agent = plistlib.loads(launchd_agent(service, file, tmp_path))

    words: list[str] = agent["ProgramArguments"]
    assert words[-2:] == ["join", "http://h:1"]
    assert ODD not in " ".join(words)
    start = words[: words.index(str(file)) + 1]
    shown = subprocess.check_output([*start, "sh", "-c", 'printf %s "$SHOAL_TOKEN"'])
    assert shown.decode() == ODD
    assert agent["Label"] == "shoal.join"
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["StandardErrorPath"] == str(tmp_path / "join.log")


def test_agent_of_a_coordinator_limits_its_log_and_keeps_no_announcement() -> None:
    logs = Path("logs")
    service = define_service(serve, ["--port", "0"], {})

    agent = plistlib.loads(launchd_agent(service, None, logs))

    assert agent["ProgramArguments"][-1] == f"--log-file={logs / 'serve.log'}"
    assert agent["StandardOutPath"] == "/dev/null"
    assert agent["ProgramArguments"][0] == service.words[0]


@posix
def test_agent_is_loaded_and_removed(home: Home) -> None:
    launchd = Launchd()
    launchd.write(define_service(serve, [], {}), None)
    file = home.folder / "Library" / "LaunchAgents" / "shoal.serve.plist"
    domain = f"gui/{os.getuid()}"

    assert launchd.state("serve") == "not loaded"
    launchd.start("serve")
    launchd.start("serve")
    assert launchd.state("serve") == "running"
    assert file.exists()
    launchd.remove("serve")

    assert not file.exists()
    changes = [call for call in home.calls if " print " not in call]
    assert changes[-3:] == [
        f"launchctl bootout {domain}/shoal.serve",
        f"launchctl bootstrap {domain} {file}",
        f"launchctl bootout {domain}/shoal.serve",
    ]


def test_windows_is_told_what_works() -> None:
    service = define_service(join, ["http://h:1", "--token", TOKEN], {})

    said = schtasks_command(service)

    assert said.startswith('schtasks /Create /SC ONLOGON /TN "Shoal join" /TR ')
    assert TOKEN not in said
    assert "set SHOAL_TOKEN with setx" in said
