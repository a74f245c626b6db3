"""Every setting of Shoal's own commands and its default; protocols have theirs."""

from dataclasses import dataclass, fields
from pathlib import Path

import platformdirs

from shoal.config.loader import flag, setting
from shoal.domain.errors import ConfigError

USER_DATA = platformdirs.user_data_path("shoal", appauthor=False)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """What ``shoal serve`` is told."""

    host: str = setting("the address to listen on", "127.0.0.1")
    port: int = setting("the port to listen on; 0 lets the system choose", 4010)
    name: str = setting(
        "what this machine is called where peers see each other (default: the host's "
        "name)",
        "",
    )
    data_dir: Path = setting("where jobs and keys are kept", USER_DATA)
    api_key: str = setting("a first API key, instead of a made one", "")
    join_token: str | None = setting(
        "what workers present, instead of a made one; empty: none is asked for", None
    )
    tls_cert: Path | None = setting(
        "the certificate to serve HTTPS with, in PEM form, followed by those that lead "
        "to its authority",
        None,
        "FILE",
    )
    tls_key: Path | None = setting("its private key, in PEM form", None, "FILE")
    open_loopback: bool = setting(
        "let programs of this machine ask without a key; web pages are kept out", False
    )
    peer: tuple[str, ...] = setting(
        "a peer to connect to, whichever wire it speaks; may be given several times",
        (),
        "HOST:PORT",
    )
    no_discovery: bool = setting(
        "announce nothing on the local network, and look for nobody", False
    )
    queue_max: int = setting("jobs that may wait; more are refused", 1000, "JOBS")
    queue_wait: float = setting("seconds a job may wait for a worker", 30.0, "SECONDS")
    hedge_after: float = setting(
        "seconds without a word from a worker until a second one, if one is idle, gets "
        "the job as well; 0: never",
        0.0,
        "SECONDS",
    )
    moderation: Path | None = setting(
        "a file of regular expressions that questions and answers must not match",
        None,
        "FILE",
    )
    share: tuple[str, ...] = setting(
        "a model that peers on the local network may copy: a GGUF file or a folder; "
        "may be given several times",
        (),
        "NAME=PATH",
    )
    blobs_max: float = setting(
        "gigabytes of large values that are kept for calls; the least recently used go "
        "first",
        8.0,
        "GB",
    )
    keep_days: float = setting("days that ended jobs are kept", 7.0)
    price_fast_inference: str = setting(
        "what a chat or a completion costs", "$0.010", "DOLLARS"
    )
    price_fast_task: str = setting(
        "what a task or an embedding costs with the policy FAST", "$0.003", "DOLLARS"
    )
    price_cheap_inference: str = setting(
        "what a chat or a completion costs with the policy CHEAP", "$0.005", "DOLLARS"
    )
    price_cheap_task: str = setting(
        "what a task or an embedding costs otherwise", "$0.001", "DOLLARS"
    )
    price_call: str = setting("what a call of a function costs", "$0")
    fee: float = setting("what the pool keeps of each price", 5.0, "PERCENT")
    spot_checks: float = setting(
        "the share of deterministic jobs, from 0 to 1, that other workers do as well, "
        "to compare",
        0.0,
        "SHARE",
    )
    webhooks: str = setting(
        "which addresses may be told of the end of jobs: public, any or off", "public"
    )
    drain: float = setting(
        "seconds that open jobs get to end when stopping", 30.0, "SECONDS"
    )


@dataclass(frozen=True, slots=True)
class X402Config:
    """How jobs over HTTP are paid for, if they are to be."""

    facilitator: str = setting(
        "the x402 facilitator that checks and settles payments of jobs; empty: nothing "
        "is to be paid",
        "",
        "URL",
    )
    pay_to: str = setting("the address that payments go to", "", "ADDRESS")
    network: str = setting(
        "the chain, by its CAIP-2 name, such as eip155:8453", "", "CHAIN"
    )
    asset: str = setting("the token to be paid in, worth a dollar", "", "ADDRESS")
    decimals: int = setting("the token's decimals", 6, "N")
    name: str = setting("the name of the token's EIP-712 domain, on EVM chains", "")
    version: str = setting("its version", "")


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """What ``shoal join`` is told, besides where to."""

    wire: str = setting(
        "the coordinator's protocol; auto: by its URL and by what answers there", "auto"
    )
    engine: tuple[str, ...] = setting(
        "what runs models: auto (the servers found on this machine, or else embedded), "
        "embedded, an OpenAI-compatible server's URL, or ray: a Ray cluster, which "
        "also does the tasks; may be given several times",
        (),
    )
    ray_address: str = setting(
        "the Ray cluster: HOST:PORT, ray://HOST:PORT, auto (the one that runs on this "
        "machine) or local (one that ends with this worker)",
        "auto",
    )
    name: str = setting("the worker's name (default: the host's)", "")
    tasks: tuple[str, ...] = setting(
        "a Python module with functions that are tasks, by its name or its file "
        "(FILE.py); may be given several times",
        (),
        "MODULE",
    )
    trust_code: bool = setting(
        "call also functions that are sent along: they may do whatever this user may",
        False,
    )
    slots: int = setting(
        "jobs at a time of each engine, and calls of functions; 0: what an engine does "
        "well, and a call for each core",
        0,
        "N",
    )
    token: str = setting("what the coordinator asks workers for", "")
    passcode: str = setting(
        "the passcode of the cluster, where that is what it asks for", ""
    )
    only_for: tuple[str, ...] = setting(
        "names of the keys to work for, with commas between; none: all", (), "KEYS"
    )
    engine_key: str = setting("the API key of the servers that --engine names", "")
    context: int = setting(
        "tokens of a chat, question and answer, in the embedded engine; 0: 4096 or "
        "what the model was made for",
        0,
        "TOKENS",
    )
    threads: int = setting(
        "the embedded engine's threads; 0: all cores but one", 0, "N"
    )
    provider_type: str = setting(
        "what this machine is, where the wire tells: DESKTOP or SEEKER, a phone",
        "DESKTOP",
    )
    identity: Path | None = setting(
        "the file with the key that the worker is known by, made at first use "
        "(default: one for each name, in the data folder)",
        None,
        "FILE",
    )
    pairing_code: str = setting(
        "a code from a user who trusts this worker with private jobs", "", "CODE"
    )


def check_x402(config: X402Config) -> None:
    """Raise ConfigError if something of what payments need is missing or no good.

    Nothing at all is good: then nobody is asked to pay.
    """
    if config == X402Config():
        return
    needed = ["facilitator", "pay_to", "network", "asset"]
    if config.network.startswith("eip155:"):
        needed += ["name", "version"]  # without, nobody can sign a payment
    given = {each.name: getattr(config, each.name) for each in fields(config)}
    for each in fields(config):
        if each.name in needed and not given[each.name]:
            raise ConfigError(
                f"{flag('x402', each)}: payments need it, together with "
                + ", ".join(
                    flag("x402", other)
                    for other in fields(config)
                    if other.name in needed and other is not each
                )
            )
    url = config.facilitator
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--x402-facilitator {url}: expected http:// or https://")
