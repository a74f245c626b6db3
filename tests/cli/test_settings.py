"""Settings, from flags, variables and files."""

from dataclasses import fields
from pathlib import Path

import pytest

from shoal.config import JoinConfig, ServeConfig
from shoal.config.loader import USER_FILE, check_file, load
from shoal.domain.errors import ConfigError
from shoal.protocols import discover


def settings(
    flags: dict[str, object] | None = None,
    environment: dict[str, str] | None = None,
    file: Path | None = None,
) -> ServeConfig:
    return load(ServeConfig, "serve", flags or {}, file, environment or {})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shoal.toml"


def test_defaults_apply() -> None:
    assert settings() == ServeConfig()
    assert load(JoinConfig, "join", {}, None, {}) == JoinConfig()


def test_flag_precedes_variable_file_and_default(file: Path) -> None:
    file.write_text("[serve]\nport = 3\nqueue_max = 3\ndrain = 3\n")
    environment = {"SHOAL_PORT": "2", "SHOAL_QUEUE_MAX": "2"}

    config = settings({"port": "1", "queue_max": None}, environment, file)

    assert (config.port, config.queue_max, config.drain) == (1, 2, 3.0)
    assert config.keep_days == ServeConfig().keep_days


def test_sizes_are_in_gigabytes_or_have_a_unit(file: Path) -> None:
    for text, size in (
        ("12GB", 12 * 10**9),
        ("0.5", 5 * 10**8),
        ("500 mb", 5 * 10**8),
        ("2T", 2 * 10**12),
        ("0", 0),
    ):
        for flag in ("memory", "lend_memory"):
            assert (
                getattr(load(JoinConfig, "join", {flag: text}, None, {}), flag) == size
            )
    file.write_text("[join]\nmemory = 1.5\n")
    assert load(JoinConfig, "join", {}, file, {}).memory == 1_500_000_000
    for text in ("-1", "12KB", "inf", "", "GB"):
        with pytest.raises(ConfigError, match="expected a size, such as 12GB"):
            load(JoinConfig, "join", {"memory": text}, None, {})


@pytest.mark.parametrize("name", sorted(discover()))
def test_every_wire_has_flags_and_variables_of_its_own(name: str) -> None:
    config = discover()[name].config
    secret = next(each.name for each in fields(config) if each.metadata.get("secret"))
    variable = f"SHOAL_{name}_{secret}".upper()

    loaded = load(config, name, {}, None, {variable: "in the environment"})

    assert getattr(loaded, secret) == "in the environment"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve]\nport = true", "[serve] port: expected a whole number"),
        ("[serve]\nport = 1.5", "[serve] port: expected a whole number"),
        ("[serve]\nport = inf", "[serve] port: expected a whole number"),
        ("[serve]\nport = -1", "[serve] port: expected a whole number of 0 or more"),
        ("[serve]\ndrain = nan", "[serve] drain: expected a number of 0 or more"),
        ("[serve]\ndrain = inf", "[serve] drain: expected a number of 0 or more"),
        ("[serve]\ndrain = [1]", "[serve] drain: expected a number"),
        ("[serve]\nhost = 5", "[serve] host: expected text"),
        ('[serve]\nplain = "false"', "[serve] plain: expected true or false, without"),
        ('[serve]\nplain = ""', "[serve] plain: expected true or false, without"),
        ("[serve]\nplain = 1", "[serve] plain: expected true or false, without"),
        ("[serve]\nprot = 5", "[serve]: unknown setting prot"),
        ("serve = 5", "serve must be a table"),
        ("[serve\n", "shoal.toml"),
    ],
)
def test_error_names_a_wrong_line(file: Path, text: str, said: str) -> None:
    file.write_text(text)

    with pytest.raises(ConfigError) as caught:
        settings(file=file)

    assert said in str(caught.value)
    assert "shoal.toml" in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"\x00"])
def test_error_names_a_binary_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=r"shoal\.toml"):
        settings(file=file)


def test_given_file_must_exist(file: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        settings(file=file)


def test_default_file_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    assert USER_FILE.name == "shoal.toml"
    monkeypatch.setattr("shoal.config.loader.USER_FILE", file)

    assert settings(file=file) == ServeConfig()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SHOAL_PORT", "x", "SHOAL_PORT: expected a whole number of 0 or more"),
        ("SHOAL_QUEUE_WAIT", "-1", "SHOAL_QUEUE_WAIT: expected a number of 0 or more"),
        ("SHOAL_DRAIN", "1e999", "SHOAL_DRAIN"),
    ],
)
def test_error_names_a_wrong_variable(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(environment={name: value})

    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("value", "wanted"), [("7", 7.0), ("0.5", 0.5), ("1e3", 1000.0), ("0", 0.0)]
)
def test_numbers_may_have_separators(value: str, wanted: float) -> None:
    assert settings({"drain": value}).drain == wanted


def test_secret_may_be_in_a_file_that_a_variable_names(file: Path) -> None:
    file.write_text("s3cret\n")
    environment = {"SHOAL_JOIN_TOKEN_FILE": str(file), "SHOAL_PORT_FILE": str(file)}

    assert settings(environment=environment) == ServeConfig(join_token="s3cret")
    both = environment | {"SHOAL_JOIN_TOKEN": "given"}
    assert settings(environment=both).join_token == "given"
    assert settings({"join_token": "flag"}, environment).join_token == "flag"


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("\n", "the file is empty")]
)
def test_error_names_a_variable_whose_file_has_no_secret(
    file: Path, text: str | None, said: str
) -> None:
    if text is not None:
        file.write_text(text)

    with pytest.raises(ConfigError, match=said) as caught:
        settings(environment={"SHOAL_API_KEY_FILE": str(file)})

    assert f"SHOAL_API_KEY_FILE={file}" in str(caught.value)


def test_tilde_is_expanded_in_paths() -> None:
    assert settings({"data_dir": "~/x"}).data_dir == Path.home() / "x"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = 4015", "port must be in a table, such as [serve]"),
        ("[server]\nport = 4015", "unknown table [server]; expected [join], [serve]"),
    ],
)
def test_unknown_setting_in_a_file_is_rejected(
    file: Path, text: str, said: str
) -> None:
    file.write_text(text)

    with pytest.raises(ConfigError) as error:
        check_file(file, {"serve", "join"})

    assert said in str(error.value)


@pytest.mark.parametrize(
    ("flag", "environment", "text", "expected"),
    [
        (None, {}, "", ()),
        (["auto", "embedded"], {"SHOAL_ENGINE": "x"}, "", ("auto", "embedded")),
        (["a, b", "c"], {}, "", ("a", "b", "c")),
        (None, {"SHOAL_ENGINE": "a,b"}, 'engine = ["c"]', ("a", "b")),
        (None, {}, 'engine = ["c", "d"]', ("c", "d")),
        (None, {}, 'engine = "c"', ("c",)),
        (None, {}, "engine = []", ()),
    ],
)
def test_list_setting_is_a_list_or_has_commas(
    file: Path,
    flag: object,
    environment: dict[str, str],
    text: str,
    expected: tuple[str, ...],
) -> None:
    file.write_text(f"[join]\n{text}\n")

    config = load(JoinConfig, "join", {"engine": flag}, file, environment)

    assert config.engine == expected


@pytest.mark.parametrize("text", ["engine = 5", "engine = [5]", "engine = {a = 1}"])
def test_error_names_a_list_setting_with_other_values(file: Path, text: str) -> None:
    file.write_text(f"[join]\n{text}\n")

    with pytest.raises(
        ConfigError, match=(r"\[join\] engine: expected a list of strings")
    ):
        load(JoinConfig, "join", {}, file, {})


@pytest.mark.parametrize(
    ("line", "mode", "warned"),
    [
        ('api_key = "k"', 0o644, True),
        ('api_key = "k"', 0o600, False),
        ("port = 3", 0o644, False),
    ],
)
def test_file_with_secrets_should_be_readable_only_to_its_user(
    file: Path,
    caplog: pytest.LogCaptureFixture,
    line: str,
    mode: int,
    *,
    warned: bool,
) -> None:
    file.write_text(f"[serve]\n{line}\n")
    file.chmod(mode)

    settings(file=file)

    assert ("other users can read it: chmod 600" in caplog.text) is warned
