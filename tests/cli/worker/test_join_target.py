"""Resolution of the coordinator to join."""

import asyncio
import socket
import sys
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trustme

from cli.coordinators import NEVER, ORIGINAL, Answers, Sites
from gateway.serving import serving
from shoal.app.fleet_files import save_fleet
from shoal.cli.worker import join_target
from shoal.cli.worker.join_target import (
    ListeningTarget,
    listening_target,
    resolve_direct,
    resolve_target,
)
from shoal.config import JoinConfig
from shoal.config.loader import USER_FILE
from shoal.config.runtime_file import URL_FILE, publish_url
from shoal.domain.credentials import with_fingerprint
from shoal.domain.errors import ConfigError, Unavailable
from shoal.protocols import discover
from shoal.transports.mdns import ANY_ADDRESS, addresses_of
from shoal.transports.tls import fingerprint_of

HEALTH = {"status": "ok", "shoal": "0.2"}


async def test_local_coordinator_is_the_default(
    tmp_path: Path,
) -> None:
    (tmp_path / "join-token").write_text("secret\n")

    target = await resolve_target("", "auto", "", tmp_path)

    assert target.url == "http://127.0.0.1:4010"
    assert target.token == "secret"
    assert target.protocol.preferred


async def test_given_token_precedes_the_stored_one(
    sites: Sites, tmp_path: Path
) -> None:
    (tmp_path / "join-token").write_text("secret\n")
    url = await sites({"/healthz": HEALTH})
    (tmp_path / URL_FILE).write_text(url)

    target = await resolve_target("", "auto", "mine", tmp_path)

    assert (target.url, target.token) == (url, "mine")


@pytest.mark.parametrize("found", [True, False])
async def test_foreign_token_prefers_the_lan_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    async def nearby(kind: str, *, secure: bool, local_error: str) -> str:
        if not found:
            raise ConfigError("none was seen")
        return "tcp://192.0.2.7:4011"

    (tmp_path / "join-token").write_text("secret\n")
    monkeypatch.setattr(join_target, "find_lan_coordinator", nearby)
    (tmp_path / URL_FILE).write_text("http://127.0.0.1:1")

    target = await resolve_target("", "auto", "another", tmp_path)

    assert target.url == ("tcp://192.0.2.7:4011" if found else "http://127.0.0.1:1")
    assert target.token == "another"


async def test_stored_token_is_sent_to_no_other_coordinator(tmp_path: Path) -> None:
    (tmp_path / "join-token").write_text("secret\n")

    assert (
        await resolve_target("http://elsewhere:4010", "auto", "", tmp_path)
    ).token == ""


@pytest.fixture
def own_address() -> str:
    """An address of this machine that is not loopback."""
    for anywhere in ANY_ADDRESS:
        for each in addresses_of(anywhere):
            if "%" not in each:
                return f"[{each}]" if ":" in each else each
    pytest.skip("this machine has no network")


def published(data: Path, url: str, certificate: str = "") -> None:
    """Leave what a running coordinator leaves in its folder."""
    (data / "join-token").write_text("secret\n")
    (data / URL_FILE).write_text(url)
    if certificate:
        (data / "certificate.pem").write_text(certificate)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_url_of_this_machines_coordinator_needs_no_token(
    sites: Sites, tmp_path: Path, host: str
) -> None:
    url = await sites({"/healthz": HEALTH})
    published(tmp_path, url)

    target = await resolve_target(url.replace("127.0.0.1", host), "auto", "", tmp_path)

    assert target.token == "secret"
    assert target.token_file == tmp_path / "join-token"


async def test_own_address_of_a_coordinator_that_is_down_needs_no_token(
    tmp_path: Path, own_address: str
) -> None:
    published(tmp_path, "http://127.0.0.1:1")

    for host in (own_address, socket.gethostname()):
        target = await resolve_target(f"http://{host}:1", "auto", "", tmp_path)
        assert target.token == "secret", host
    given = await resolve_target("http://127.0.0.1:1", "auto", "mine", tmp_path)
    assert (given.token, given.token_file) == ("mine", None)


@pytest.mark.parametrize(
    "url", ["http://192.0.2.77:1", "http://127.0.0.1:2", "http://no.invalid:1"]
)
async def test_other_coordinators_do_not_get_the_token_of_this_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr(join_target, "HEALTH_TIMEOUT", 0.05)
    published(tmp_path, "http://127.0.0.1:1")

    target = await resolve_target(url, "auto", "", tmp_path)

    assert (target.token, target.token_file) == ("", None)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere loopback has one address"
)
async def test_what_else_listens_on_this_machine_does_not_get_the_token(
    sites: Sites, tmp_path: Path
) -> None:
    url = await sites({"/healthz": {**HEALTH, "direct": {}}})
    published(tmp_path, url)
    body = b'{"shoal": "0.2"}'

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = b"Content-Length: %d" % len(body)
        writer.write(b"\r\n".join([b"HTTP/1.1 200 OK", length, b"", body]))
        await writer.drain()
        writer.close()

    # No other test connects from this address, and so has the port there.
    other, port = "127.0.0.7", urlsplit(url).port
    async with await asyncio.start_server(answer, other, port):
        target = await resolve_target(f"http://{other}:{port}", "auto", "", tmp_path)

    assert target.token == ""


async def test_own_coordinator_with_a_certificate_is_joined_by_https(
    tmp_path: Path, certificate: str
) -> None:
    published(tmp_path, "https://127.0.0.1:1", certificate)

    target = await resolve_target("https://localhost:1", "auto", "", tmp_path)

    assert target.fingerprint == fingerprint_of(certificate)
    assert target.token == "secret"
    with pytest.raises(ConfigError, match="join https://localhost:1"):
        await resolve_target("http://localhost:1", "auto", "", tmp_path)


async def test_https_to_a_port_without_tls_is_an_error(
    sites: Sites, tmp_path: Path
) -> None:
    url = await sites({"/healthz": HEALTH})

    with pytest.raises(ConfigError, match="begins with http://"):
        await resolve_target(url.replace("http:", "https:"), "auto", "", tmp_path)


async def test_without_a_data_folder_the_lan_is_searched(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    found = await sites({"/healthz": HEALTH})

    async def nearby(kind: str, *, secure: bool, local_error: str) -> str:
        assert "connection refused" in local_error
        assert kind == "_shoal._tcp"
        asked.append(secure)
        return found

    monkeypatch.setattr(join_target, "find_lan_coordinator", nearby)
    monkeypatch.setattr(join_target, "local_url", lambda folder: "http://127.0.0.1:1")
    pinned = with_fingerprint("secret", bytes(32))

    plain = await resolve_target("", "auto", "secret", tmp_path / "none")
    secure = await resolve_target("", "auto", pinned, tmp_path / "none")

    assert (plain.url, plain.token) == (found, "secret")
    assert asked == [False, True]
    assert (secure.token, secure.fingerprint) == ("secret", bytes(32))
    assert plain.protocol.preferred


async def test_local_coordinator_that_is_down_is_awaited(tmp_path: Path) -> None:
    (tmp_path / "join-token").write_text("secret\n")
    (tmp_path / URL_FILE).write_text("http://127.0.0.1:1")

    target = await resolve_target("", "auto", "", tmp_path)

    assert target.url == "http://127.0.0.1:1"
    assert target.protocol.preferred
    assert "shoal join http://HOST:4010" in target.advice


async def test_local_coordinator_is_found_by_its_runtime_file(
    tmp_path: Path,
) -> None:
    with publish_url(tmp_path, "127.0.0.1", 9, secure=False):
        target = await resolve_target("", "grandsage", "", tmp_path)

    assert target.url == "http://127.0.0.1:9"


async def test_other_wires_join_this_machine_without_a_data_folder(
    tmp_path: Path,
) -> None:
    target = await resolve_target("", "grandsage", "", tmp_path / "none")

    assert (target.url, target.token) == ("http://127.0.0.1:4010", "")


async def test_coordinator_is_authenticated_by_its_certificate(
    tmp_path: Path, certificate: str
) -> None:
    (tmp_path / "certificate.pem").write_text(certificate)

    target = await resolve_target("", "auto", "", tmp_path)

    assert target.url == "https://127.0.0.1:4010"
    assert target.fingerprint == fingerprint_of(certificate)


@pytest.fixture
def certificate() -> str:
    authority = trustme.CA()
    (chain,) = authority.issue_cert("127.0.0.1").cert_chain_pems
    return chain.bytes().decode()


@pytest.mark.parametrize(
    ("url", "wire", "said"),
    [
        ("nonsense", "auto", "unknown protocol"),
        ("http://127.0.0.1", "pigeon", "--wire pigeon: unknown protocol"),
    ],
)
async def test_invalid_url_is_rejected(
    url: str, wire: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        await resolve_target(url, wire, "", tmp_path)


async def test_token_in_a_url_is_not_shown(tmp_path: Path) -> None:
    target = await resolve_target("ws://host/ws?token=secret", "auto", "", tmp_path)

    assert target.display_url == "ws://host/ws"


async def test_first_of_several_addresses_that_answers_is_joined(
    sites: Sites, tmp_path: Path
) -> None:
    first, second = await sites({"/healthz": HEALTH}), await sites({"/healthz": HEALTH})
    down, third = "http://127.0.0.1:1", "http://127.0.0.1:2"

    target = await resolve_target(f"{down}, {first},{second}", "auto", "t", tmp_path)
    assert target.url == first
    assert target.others == (down, second)
    assert target.http_urls == [first, down, second]

    none = await resolve_target(f"{down},{third}", "auto", "t", tmp_path)
    assert (none.url, none.others) == (down, (third,))
    assert none.unreachable


async def test_addresses_of_one_pool_are_equally_safe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="all https://, or none"):
        await resolve_target("https://one,http://two", "auto", "t", tmp_path)


async def test_shoal_coordinator_is_joined_by_the_preferred_wire(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as pool:
        target = await resolve_target(pool.url, "auto", "", tmp_path)

    assert target.protocol.preferred
    assert target.protocol.joint


@pytest.mark.parametrize(
    ("ports", "direct"),
    [
        ({"transport": 4011, "heartbeat": 4012}, "tls-any://127.0.0.1:4011"),
        ({"heartbeat": 4012}, ""),
        ({"transport": 0}, ""),
        ({"transport": 65536}, ""),
        ({"transport": "4011"}, ""),
        ({"transport": True}, ""),
        ([4011], ""),
    ],
)
async def test_a_port_of_a_wire_is_looked_up_each_time(
    sites: Sites, tmp_path: Path, ports: object, direct: str
) -> None:
    answers: dict[str, object] = {"/healthz": {**HEALTH, "direct": {}}}
    target = await resolve_target(await sites(answers), "macfleet", "", tmp_path)
    assert await resolve_direct(target) == ""

    answers["/healthz"] = {**HEALTH, "direct": {"macfleet": ports}}

    assert (await resolve_direct(target)).partition("?")[0] == direct


async def test_a_port_is_not_looked_up_during_an_outage(tmp_path: Path) -> None:
    target = await resolve_target("http://127.0.0.1:1", "macfleet", "", tmp_path)

    with pytest.raises(Unavailable, match="connection refused"):
        await resolve_direct(target)


async def test_who_answers_for_a_coordinator_cannot_turn_encryption_off(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = {"transport:tcp": 4013}
    url = await sites({"/healthz": {**HEALTH, "direct": {"macfleet": ports}}})
    target = replace(
        await resolve_target(url, "auto", "", tmp_path),
        protocol=discover()["macfleet"],
    )
    assert await resolve_direct(target) == "tcp://127.0.0.1:4013"  # on this machine

    monkeypatch.setattr(join_target, "is_own_host", lambda host: False)

    with pytest.raises(Unavailable, match="give --plain"):
        await resolve_direct(target)
    assert await resolve_direct(replace(target, plain=True)) == "tcp://127.0.0.1:4013"


@pytest.mark.parametrize(
    ("url", "wire", "plain", "refused"),
    [
        ("http://192.0.2.7:4010", "dispatch", False, True),
        ("ws://192.0.2.7/ws", "grandsage", False, True),
        ("ws://192.0.2.7/ws", "grandsage", True, False),
        ("wss://192.0.2.7/ws", "grandsage", False, False),
        ("ws://127.0.0.1/ws", "grandsage", False, False),
        ("ws:///ws", "grandsage", False, False),  # the wire names what is missing
        ("http://localhost:4010", "dispatch", False, False),
        ("http://192.0.2.7:4010", "tealenet", False, True),
        ("http://192.0.2.7:4010", "shoal", False, False),  # it encrypts
        ("http://192.0.2.7:4010", "macfleet", False, False),  # so does its port
    ],
)
def test_wires_without_encryption_need_plain_beyond_this_machine(
    url: str, wire: str, plain: bool, refused: bool
) -> None:
    target = join_target.JoinTarget(url, discover()[wire], "t", None, plain=plain)

    with pytest.raises(ConfigError, match="--plain") if refused else nullcontext():
        join_target.check_encryption(target)


async def test_an_invitation_without_a_token_pins_the_certificate_alone() -> None:
    token, fingerprint = join_target.split_token(with_fingerprint("any", bytes(32)))

    assert (token, fingerprint) == ("", bytes(32))
    assert join_target.split_token("any") == ("any", None)


async def test_peer_is_joined_at_its_address(tmp_path: Path) -> None:
    target = await resolve_target("tcp://192.0.2.7:4011", "auto", "", tmp_path)

    assert target.protocol.name == "tealenet"
    assert target.direct == ""


async def test_relay_is_joined_at_its_url(tmp_path: Path) -> None:
    url = "wss://relay.example/ws"

    target = await resolve_target(url, "tealenet", "", tmp_path)

    assert (target.url, target.protocol.name) == (url, "tealenet")


@pytest.mark.parametrize("path", ["", "/", "/below/"])
async def test_original_coordinator_is_joined_by_its_own_wire(
    sites: Sites, tmp_path: Path, path: str
) -> None:
    url = await sites({path.rstrip("/") + "/v1/health": ORIGINAL})

    target = await resolve_target(url + path, "auto", "", tmp_path)

    assert target.protocol.name == "dispatch"
    assert target.http_url + "/v1/health" == url + path.rstrip("/") + "/v1/health"


@pytest.mark.parametrize(
    "answers",
    [
        {"/healthz": {"status": "ok", "shoal": "0.1"}, "/v1/health": ORIGINAL},
        {"/v1/health": {**ORIGINAL, "network": "shoal"}},
    ],
    ids=["both faces", "behind a proxy"],
)
async def test_shoal_is_not_mistaken_for_an_original_coordinator(
    sites: Sites, tmp_path: Path, answers: Answers
) -> None:
    target = await resolve_target(await sites(answers), "auto", "", tmp_path)

    assert target.protocol.preferred


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"/healthz": {"status": "ok"}, "/v1/health": {"status": "ok"}},
        {"/healthz": [1, 2], "/v1/health": "shoal"},
        {"/v1/health": "x" * 100_000},
    ],
    ids=["nothing", "another service", "odd JSON", "a flood"],
)
async def test_other_servers_are_not_coordinators(
    sites: Sites, tmp_path: Path, answers: Answers
) -> None:
    url = await sites(answers)

    with pytest.raises(ConfigError, match="not a coordinator that Shoal recognises"):
        await resolve_target(url, "auto", "", tmp_path)


async def test_named_wire_is_not_probed(sites: Sites, tmp_path: Path) -> None:
    url = await sites({})

    assert (
        await resolve_target(url, "dispatch", "", tmp_path)
    ).protocol.name == "dispatch"


async def test_redirect_is_not_followed(sites: Sites, tmp_path: Path) -> None:
    elsewhere = await sites({"/healthz": {"shoal": "0.1"}})
    url = await sites({"/healthz": elsewhere + "/healthz"}, redirects=True)

    with pytest.raises(ConfigError, match="not a coordinator that Shoal recognises"):
        await resolve_target(url, "auto", "", tmp_path)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("http://127.0.0.1:1", "give --wire for a coordinator of another program"),
        ("http://no.invalid", "the URL has no port, so it is 80"),
    ],
)
async def test_unreachable_coordinator_is_assumed_to_be_shoal(
    tmp_path: Path, url: str, advice: str
) -> None:
    target = await resolve_target(url, "auto", "", tmp_path)

    assert target.protocol.preferred
    assert advice in target.advice
    assert target.unreachable.startswith(f"{url}: ")


async def test_unhealthy_coordinator_is_assumed_to_be_shoal(
    sites: Sites, tmp_path: Path
) -> None:
    url = await sites({"/healthz": {"error": "starting"}}, status=503)

    target = await resolve_target(url, "auto", "", tmp_path)

    assert target.protocol.preferred
    assert "check the address" in target.advice


async def test_silent_server_times_out(
    sites: Sites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_target, "HEALTH_TIMEOUT", 0.05)

    target = await resolve_target(
        await sites({"/healthz": NEVER}), "auto", "", tmp_path
    )

    assert target.protocol.preferred
    assert "check the address" in target.advice


async def test_server_without_http_is_rejected_at_once(tmp_path: Path) -> None:
    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        url = "http://127.0.0.1:{1}".format(*server.sockets[0].getsockname())

        with pytest.raises(ConfigError, match="does not speak HTTP; give the address"):
            await resolve_target(url, "auto", "", tmp_path)


async def test_token_with_a_fingerprint_means_shoal(
    tmp_path: Path, certificate: str
) -> None:
    token = with_fingerprint("secret", fingerprint_of(certificate))

    target = await resolve_target("https://127.0.0.1:1", "auto", token, tmp_path)

    assert target.protocol.preferred
    assert target.token == "secret"


@pytest.mark.parametrize(
    ("url", "web"),
    [
        ("http://host:1", "http://host:1"),
        ("ws://host:1/a/?b", "http://host:1/a"),
        ("wss://host", "https://host"),
    ],
)
async def test_coordinator_is_queried_over_http(
    url: str, web: str, tmp_path: Path
) -> None:
    assert (await resolve_target(url, "dispatch", "", tmp_path)).http_url == web


def listen(
    config: JoinConfig,
    data: Path,
    url: str = "",
    *,
    with_models: bool = False,
    **given: object,
) -> ListeningTarget | None:
    """Return the fleet to listen in, with values of the wire's own options."""
    options = dict.fromkeys(
        (each.name for each in fields(discover()["macfleet"].config)), None
    )
    flags = {"macfleet": {**options, **given}}
    return listening_target(
        url, config, flags, USER_FILE, data, with_models=with_models
    )


LISTENING = JoinConfig(listen=True, token="a-fleet-token")


@pytest.mark.parametrize(
    ("config", "given", "token"),
    [
        (LISTENING, {}, "a-fleet-token"),
        (LISTENING, {"url": "192.0.2.7:50051"}, "a-fleet-token"),
        (LISTENING, {"token": "another-one"}, "another-one"),
        (LISTENING, {"open": True}, ""),
        (replace(LISTENING, token=""), {}, "of the pairing"),
        (replace(LISTENING, token=""), {"open": True}, ""),
    ],
)
def test_listening_worker_has_the_token_of_its_fleet(
    config: JoinConfig, given: dict[str, Any], token: str, tmp_path: Path
) -> None:
    fleets = discover()["macfleet"].fleets
    assert fleets is not None
    save_fleet(tmp_path, fleets, "of the pairing", "lab")

    listening = listen(config, tmp_path, **given)

    assert listening is not None
    assert listening.target.protocol.name == "macfleet"
    assert listening.target.url == given.get("url", "")
    assert listening.target.token == token


@pytest.mark.parametrize(
    ("wire", "with_models"), [("auto", True), ("shoal", True), ("shoal", False)]
)
def test_worker_with_models_listens_on_shoals_own_protocol(
    wire: str, with_models: bool, tmp_path: Path
) -> None:
    config = replace(LISTENING, wire=wire)

    listening = listen(config, tmp_path, with_models=with_models)

    assert listening is not None
    assert listening.target.protocol.name == "shoal"
    assert listening.target.token == "a-fleet-token"


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (LISTENING, {"url": "http://192.0.2.7:4010"}, "expected HOST:PORT of a node"),
        (LISTENING, {"url": "192.0.2.7"}, "expected HOST:PORT of a node"),
        (replace(LISTENING, wire="tealenet"), {}, "use --wire macfleet"),
        (JoinConfig(), {"open": True}, "--macfleet-open only has an effect with"),
        (LISTENING, {"with_models": True, "open": True}, "--macfleet-open only has"),
        (LISTENING, {"with_models": True, "url": "h:1"}, "--shoal-workers"),
        (replace(LISTENING, token=""), {"with_models": True}, "as --token"),
    ],
)
def test_contradictory_flags_of_a_listening_worker_are_rejected(
    config: JoinConfig, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        listen(config, tmp_path, **given)
    assert listen(JoinConfig(), tmp_path) is None
