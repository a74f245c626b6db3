"""nginx and Caddy, with the files of ``examples/deploy``, before coordinators."""

import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.documents import blocks_of
from harness.ports import free_port
from live.container_files import ROOT
from live.programs import eventually
from transports.certificates import Certificate

FOLDER = ROOT / "examples" / "deploy"
NAME = "pool.example.com"
"""What the files call the coordinator; here it is ``localhost``."""

NGINX = """\
user root;
pid {folder}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/conf.d/shoal.conf;
}}
"""
CADDY = """\
{{
    admin off
    auto_https off
    storage file_system {folder}/caddy
}}
"""


@dataclass(frozen=True, slots=True)
class Replacements:
    """What a file has to name here: addresses, and the files of a certificate."""

    folder: Path
    port: int
    coordinators: Sequence[str]
    certificate: Certificate

    @property
    def site(self) -> str:
        return f"https://localhost:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the file for nodes."""
        return {**os.environ, "SITE": self.site, "NODES": " ".join(self.coordinators)}


def nginx(here: Replacements) -> list[str]:
    """Write the configuration; return the command that checks or runs it."""
    text = (FOLDER / "nginx.conf").read_text()
    if len(here.coordinators) > 1:
        text = re.sub(
            r"^upstream.*?^}\n", _upstream_of_nodes(), text, flags=re.M | re.S
        )
    addresses = re.findall(r"^    server ([0-9.]+:[0-9]+)", text, re.M)
    for old, new in (
        *zip(addresses, here.coordinators, strict=True),
        ("listen 443", f"listen 127.0.0.1:{here.port}"),
        (f"/etc/letsencrypt/live/{NAME}/fullchain.pem", str(here.certificate.file)),
        (f"/etc/letsencrypt/live/{NAME}/privkey.pem", str(here.certificate.key)),
        (NAME, "localhost"),
    ):
        assert old in text, old
        text = text.replace(old, new)
    (here.folder / "conf.d").mkdir(parents=True)
    (here.folder / "conf.d" / "shoal.conf").write_text(text)
    file = here.folder / "nginx.conf"
    file.write_text(NGINX.format(folder=here.folder))
    return ["nginx", "-p", str(here.folder), "-c", str(file)]


def _upstream_of_nodes() -> str:
    """Return what the page shows in place of the file's upstream."""
    (shown,) = (
        block.code
        for block in blocks_of(ROOT / "docs" / "deployment.md")
        if block.language == "nginx" and block.code.startswith("upstream")
    )
    return shown


def caddy(here: Replacements) -> list[str]:
    """Write the configuration; return the command that checks or runs it."""
    several = len(here.coordinators) > 1
    text = (FOLDER / ("Caddyfile.nodes" if several else "Caddyfile")).read_text()
    tls = f"bind 127.0.0.1\n\ttls {here.certificate.file} {here.certificate.key}"
    named = f"{{$SITE:{NAME}}} {{" if several else f"\n{NAME} {{"
    found = [] if several else [("127.0.0.1:4010", here.coordinators[0])]
    new_site = named if several else f"\n{here.site} {{"
    for old, new in (*found, (named, f"{new_site}\n\t{tls}")):
        assert old in text, old
        text = text.replace(old, new)
    here.folder.mkdir(parents=True, exist_ok=True)
    (here.folder / "Caddyfile").write_text(CADDY.format(folder=here.folder) + text)
    return ["caddy"]


WRITERS: dict[str, Callable[[Replacements], list[str]]] = {
    "nginx": nginx,
    "caddy": caddy,
}


@contextmanager
def reverse_proxy(
    kind: str, folder: Path, coordinators: Sequence[str], certificate: Certificate
) -> Iterator[str]:
    """Run a reverse proxy in front of a coordinator, or of nodes; yield its URL.

    ``coordinators`` are their addresses, as HOST:PORT.
    """
    here = Replacements(folder, free_port(), coordinators, certificate)
    command = WRITERS[kind](here)
    if kind == "nginx":
        checked, run = [*command, "-t"], [*command, "-g", "daemon off;"]
    else:
        flags = ["--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]
        checked, run = [*command, "validate", *flags], [*command, "run", *flags]
    subprocess.run(checked, check=True, capture_output=True, env=here.environment)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            run, stdin=subprocess.DEVNULL, stderr=log, env=here.environment
        )
    try:
        eventually(lambda: _listens(here.port), f"{kind} listens")
        yield here.site
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False
