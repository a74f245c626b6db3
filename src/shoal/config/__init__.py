"""Settings of Shoal's commands, with their defaults; protocols declare their own."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import platformdirs

from shoal.config.loader import USER_FILE, Size, flag, load_setting
from shoal.domain.errors import ConfigError
from shoal.domain.settings import setting

USER_DATA = platformdirs.user_data_path("shoal", appauthor=False)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Settings of ``shoal serve``."""

    host: str = setting(
        "address to listen on; 0.0.0.0: any, for other machines",
        "127.0.0.1",
        everyday=True,
    )
    port: int = setting("port to listen on; 0: any free port", 4010, everyday=True)
    ollama_port: int | None = setting(
        "further port, for Ollama's API (its clients expect 11434); 0: any free port "
        "(default: none)",
        None,
        everyday=True,
    )
    fronts: int = setting(
        "processes that serve HTTP, on as many cores; streams survive the loss of the "
        "one that has the pool; 0: one process for all",
        0,
        "N",
    )
    ollama_open: bool = setting(
        "access to Ollama's API without a key, for anyone who reaches it", False
    )
    name: str = setting(
        "name of this machine, as peers see it (default: the host name)",
        "",
        everyday=True,
    )
    data_dir: Path = setting(
        "folder of the database, keys and other data", USER_DATA, everyday=True
    )
    store: str = setting(
        "PostgreSQL database, postgresql://USER@HOST/DATABASE (default: a file in the "
        "data folder)",
        "",
        "URL",
        secret=True,  # it may have a password
        bearer=False,
    )
    contents: str = setting(
        "S3 bucket for clients' files and large values of calls, s3://BUCKET/PREFIX "
        "(default: with the database)",
        "",
        "URL",
    )
    node: str = setting(
        "one of several nodes that share the --store, so that the pool survives the "
        "loss of a machine; the others reach this one here",
        "",
        "HOST:PORT",
    )
    api_key: str = setting(
        "first API key (default: a random one, stored in the data folder)",
        "",
        secret=True,
        everyday=True,
    )
    join_token: str | None = setting(
        "join token of workers; empty: none required (default: a random one, stored in "
        "the data folder)",
        None,
        secret=True,
        everyday=True,
    )
    tls: str = setting(
        "encryption of HTTP: off, or auto (a certificate of a local authority, created "
        "at first use)",
        "off",
        "off|auto",
        everyday=True,
    )
    tls_cert: Path | None = setting(
        "PEM file with the HTTPS certificate and its intermediate certificates",
        None,
        "FILE",
    )
    tls_key: Path | None = setting(
        "PEM file with the private key of the certificate", None, "FILE"
    )
    plain: bool = setting(
        "admission of Shoal's workers on other machines without encryption "
        "(`shoal join --plain`)",
        False,
    )
    open_loopback: bool = setting(
        "access without a key for programs on this machine; web pages are refused",
        False,
        everyday=True,
    )
    approve_nodes: bool = setting(
        "approval of each machine before it gets work: shoal nodes approve NAME", False
    )
    relay_open: bool = setting(
        "use of this coordinator's relay by nodes without a join token or passcode",
        False,
    )
    allowed_host: tuple[str, ...] = setting(
        "additional name of this coordinator, for web pages and clients without a "
        "key; repeatable",
        (),
        "NAME",
    )
    allowed_origin: tuple[str, ...] = setting(
        "web pages of another site that may use this coordinator; repeatable",
        (),
        "https://HOST[:PORT]",
    )
    otlp_endpoint: str = setting(
        "OpenTelemetry collector for traces, such as http://127.0.0.1:4318 (default: "
        "that of OTEL_EXPORTER_OTLP_ENDPOINT, or none)",
        "",
        "URL",
    )
    trusted_proxy: tuple[str, ...] = setting(
        "address or network of a reverse proxy, whose X-Forwarded-For names the "
        "client; repeatable",
        (),
        "ADDRESS",
    )
    peer: tuple[str, ...] = setting(
        "address of a peer to connect to, with any protocol; repeatable",
        (),
        "HOST:PORT",
        everyday=True,
    )
    no_discovery: bool = setting(
        "neither announcements nor discovery on the local network", False
    )
    queue_max: int = setting(
        "limit of queued jobs; further ones are rejected", 1000, "JOBS"
    )
    queue_wait: float = setting(
        "limit of a job's time in the queue (30 s while no worker could take it)",
        600.0,
        "SECONDS",
    )
    hedge_after: float = setting(
        "silence of a worker after which an idle one gets the same job as well; 0: "
        "never",
        0.0,
        "SECONDS",
    )
    moderation: Path | None = setting(
        "file of regular expressions; prompts and answers that match are blocked",
        None,
        "FILE",
        everyday=True,
    )
    share: tuple[str, ...] = setting(
        "model that peers on the local network may copy: a GGUF file or a folder; "
        "repeatable",
        (),
        "NAME=PATH",
        everyday=True,
    )
    share_rate: float = setting(
        "limit for all copies of models together that others get from here; 0: none",
        0.0,
        "MB/s",
    )
    blobs_max: float = setting("limit of stored large values of calls", 8.0, "GB")
    file_max: float = setting(
        "limit of a file that a client uploads for a batch", 200.0, "MB"
    )
    files_max: float = setting("limit of all files of a key", 10.0, "GB")
    new_log: bool = setting(
        "a new receipt log with a new key, if the database is missing, or older than "
        "the receipts that its key has signed, or if the data folder is new and cannot "
        "tell",
        False,
    )
    keep_days: float = setting("retention of ended jobs, in days", 7.0)
    price_fast_inference: str = setting(
        "price of a chat or a completion with the policy FAST", "$0", "DOLLARS"
    )
    price_fast_task: str = setting(
        "price of a task or an embedding with the policy FAST", "$0", "DOLLARS"
    )
    price_cheap_inference: str = setting(
        "price of a chat or a completion with the policy CHEAP", "$0", "DOLLARS"
    )
    price_cheap_task: str = setting(
        "price of a task or an embedding with any other policy", "$0", "DOLLARS"
    )
    price_call: str = setting("price of a function call", "$0", "DOLLARS")
    fee: float = setting("share of each price that the pool keeps", 5.0, "PERCENT")
    spot_checks: float = setting(
        "share of deterministic jobs, 0 to 1, that a second worker repeats for "
        "comparison",
        0.0,
        "SHARE",
    )
    list_models: str = setting(
        "models that clients list: all that they may request, or loaded ones", "all"
    )
    prefer: str = setting(
        "machines on which models are loaded first where several have room, such as "
        "gpu,mac,cpu; of one kind, the one with the fastest memory (default: of all)",
        "",
        "KIND,...",
    )
    webhooks: str = setting("permitted webhook addresses: public, any or off", "public")
    drain: float = setting(
        "time for open jobs to complete on shutdown", 30.0, "SECONDS", everyday=True
    )


@dataclass(frozen=True, slots=True)
class X402Config:
    """Settings of payments for jobs over HTTP; without them jobs are free."""

    facilitator: str = setting(
        "facilitator of x402, which verifies and settles payments; empty: no payments",
        "",
        "URL",
    )
    pay_to: str = setting("address that receives payments", "", "ADDRESS")
    network: str = setting("CAIP-2 id of the chain, such as eip155:8453", "", "CHAIN")
    asset: str = setting(
        "address of the payment token, worth one dollar", "", "ADDRESS"
    )
    decimals: int = setting("decimals of the token", 6, "N")
    name: str = setting("name in the token's EIP-712 domain, on EVM chains", "")
    version: str = setting("version in the token's EIP-712 domain", "")


@dataclass(frozen=True, slots=True)
class JoinConfig:
    """Settings of ``shoal join``."""

    wire: str = setting("protocol of the coordinator; auto: detected", "auto")
    engine: tuple[str, ...] = setting(
        "engine for models: auto (the servers found on this machine, else embedded), "
        "embedded, the URL of an OpenAI-compatible server, ray (also for tasks), or "
        "dask (for tasks only); repeatable",
        (),
        everyday=True,
    )
    ray_address: str = setting(
        "Ray cluster: HOST:PORT, ray://HOST:PORT, auto (the one running on this "
        "machine) or local (one that ends with this worker)",
        "auto",
    )
    dask_address: str = setting(
        "Dask cluster's scheduler: HOST:PORT, or tls://HOST:PORT", "127.0.0.1:8786"
    )
    name: str = setting(
        "name of the worker (default: the host name)", "", everyday=True
    )
    tasks: tuple[str, ...] = setting(
        "Python module with @shoal.task functions, as a name or a file (FILE.py); "
        "repeatable",
        (),
        "MODULE",
        everyday=True,
    )
    trust_code: bool = setting(
        "execution of functions that clients send; they have all rights of this user",
        False,
        everyday=True,
    )
    slots: int = setting(
        "concurrent jobs of each engine, and function calls; 0: the engine's own "
        "number, and one call per core",
        0,
        "N",
        everyday=True,
    )
    throttle: int | None = setting(
        "share of this machine's speed to lend, from 0 (paused) to 100; `shoal "
        "throttle` changes it later (default: that set last, else 100)",
        None,
        "PERCENT",
        everyday=True,
    )
    pause_when_active: float = setting(
        "minutes of pause after this machine's user last typed or moved the mouse; "
        "running jobs go to other workers; 0: never",
        0.0,
        "MINUTES",
        everyday=True,
    )
    wake: bool = setting(
        "let other machines of the pool wake this one when it is needed, and let it "
        "wake them (Wake-on-LAN)",
        False,
    )
    pause_on_battery: bool = setting(
        "pause while this machine runs on battery; running jobs go to other workers",
        False,
        everyday=True,
    )
    pause_above: float = setting(
        "temperature of the processor or GPU at which the worker pauses; running jobs "
        "go to other workers; 0: never",
        0.0,
        "CELSIUS",
        everyday=True,
    )
    share_rate: float = setting(
        "limit for all copies of models together that others get from here; 0: none",
        0.0,
        "MB/s",
    )
    schedule: tuple[str, ...] = setting(
        "working hours, such as 22:00-07:00 or 'mon-fri 18:00-08:00'; outside of them "
        "the worker pauses, and running jobs go to other workers; repeatable "
        "(default: always)",
        (),
        "TIME",
        everyday=True,
    )
    token: str = setting(
        "join token of the coordinator", "", secret=True, everyday=True
    )
    plain: bool = setting(
        "connections to other machines without encryption, for coordinators of other "
        "programs and of `shoal serve --plain`: the network can read token, prompts "
        "and answers",
        False,
        everyday=True,
    )
    passcode: str = setting(
        "passcode of the cluster, for protocols that require one", "", secret=True
    )
    owner: str = setting(
        "UUID of the owner of this machine, for protocols that send it", "", "UUID"
    )
    listen: bool = setting(
        "listening ports for coordinators that dial this worker: those that name it "
        "with --shoal-workers, or, without models, those of a fleet, of which a URL "
        "names one as HOST:PORT",
        False,
    )
    listen_host: str = setting("address to listen on with --listen", "0.0.0.0")
    listen_port: int = setting(
        "port to listen on with --listen and Shoal's own protocol; 0: any free port",
        4010,
    )
    only_for: tuple[str, ...] = setting(
        "API keys whose jobs to accept, by name, comma-separated (default: all); with "
        "coordinators of other programs: users, if jobs name them",
        (),
        "KEYS",
        everyday=True,
    )
    privacy: str = setting(
        "privacy class of the jobs to accept: any, public, or private (those of users "
        "who are paired with this worker)",
        "any",
        everyday=True,
    )
    price: str = setting(
        "price to ask for a job, such as $0.001; CHEAP jobs prefer the lowest "
        "(default: none)",
        "",
        "DOLLARS",
    )
    engine_key: str = setting(
        "API key of the servers named by --engine", "", secret=True
    )
    last_resort: bool = setting(
        "the servers named by --engine are hosted providers: they get jobs that no "
        "machine of the pool takes in time, of keys created with --hosted, and these "
        "pay --price-per-million",
        False,
    )
    price_per_million: str = setting(
        "what a hosted provider takes for a million tokens read and written, such as "
        "0.15,0.60",
        "",
        "DOLLARS,DOLLARS",
    )
    fields: str = setting(
        "request fields unknown to Shoal: any (for all servers), known (for none), "
        "auto (for the kinds of servers that have many such fields)",
        "auto",
    )
    context: int = setting(
        "context length in the embedded engine; 0: 4096, or the model's own if shorter",
        0,
        "TOKENS",
        everyday=True,
    )
    threads: int = setting(
        "threads of the embedded engine; 0: all cores but one", 0, "N", everyday=True
    )
    gpus: tuple[str, ...] = setting(
        "GPUs of this worker's own engines, by their numbers (those of nvidia-smi): "
        "with a worker for each GPU, one can be taken out alone; repeatable (default: "
        "all)",
        (),
        "NUMBER",
    )
    load: str = setting(
        "models that the coordinator may load here and unload: local (the files that "
        "are here), pull (also those of other machines or the hub, after copying "
        "them) or none; with local or pull given, none is loaded until one is needed "
        "(default: local)",
        "",
        "none|local|pull",
        everyday=True,
    )
    memory: Size = setting(
        "memory for the models that are loaded on order, of which several are loaded "
        "at a time, such as 12GB; 0: what is free, or that of the GPUs that run them, "
        "less a tenth",
        Size(0),
        "GB",
        everyday=True,
    )
    lend_memory: Size = setting(
        "memory for parts of models that other machines run, which fit on none, such "
        "as 12GB; 0: none; a machine that runs them may run code in the process that "
        "holds a part",
        Size(0),
        "GB",
        everyday=True,
    )
    lend_for: tuple[str, ...] = setting(
        "public key of a machine that memory is lent to; repeatable (default: all "
        "machines of the pool)",
        (),
        "KEY",
    )
    llama_cpp: str = setting(
        "folder with llama.cpp's programs llama-server and rpc-server, which run "
        "models together with other machines (default: they are looked for in PATH)",
        "",
        "FOLDER",
    )
    provider_type: str = setting(
        "kind of this machine, for protocols that report it: DESKTOP, or SEEKER (a "
        "phone)",
        "DESKTOP",
    )
    otlp_endpoint: str = setting(
        "OpenTelemetry collector for traces, such as http://127.0.0.1:4318 (default: "
        "that of OTEL_EXPORTER_OTLP_ENDPOINT, or none)",
        "",
        "URL",
    )
    identity: Path | None = setting(
        "file of the worker's signing key (default: one per name, in the data folder)",
        None,
        "FILE",
    )
    pairing_code: str = setting(
        "code from a user who trusts this worker with private jobs",
        "",
        "CODE",
        secret=True,
    )


def data_folder() -> Path:
    """Return the data folder of this machine's coordinator, as its settings name it.

    These are the variable ``SHOAL_DATA_DIR`` and the user's settings file, of which
    nothing else is read: clients have no use for the other settings of a server.

    Raises ConfigError.
    """
    found = load_setting(ServeConfig, "serve", "data_dir", USER_FILE)
    return cast(Path, found.value)


def store_url() -> str:
    """Return where the database of this machine's coordinator is, as ``data_folder``.

    Raises ConfigError.
    """
    found = load_setting(ServeConfig, "serve", "store", USER_FILE)
    return cast(str, found.value)


def check_x402(config: X402Config) -> None:
    """Raise ConfigError if a setting that payments need is missing or invalid.

    Without any setting, payments are off.
    """
    if config == X402Config():
        return
    needed = ["facilitator", "pay_to", "network", "asset"]
    if config.network.startswith("eip155:"):
        needed += ["name", "version"]  # clients sign payments with them
    given = {each.name: getattr(config, each.name) for each in fields(config)}
    for each in fields(config):
        if each.name in needed and not given[each.name]:
            raise ConfigError(
                f"{flag('x402', each)}: required for payments, together with "
                + ", ".join(
                    flag("x402", other)
                    for other in fields(config)
                    if other.name in needed and other is not each
                )
            )
    url = config.facilitator
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--x402-facilitator {url}: expected http:// or https://")
