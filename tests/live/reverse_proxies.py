"""nginx and Caddy, with the files of ``examples/deploy`` in front of a coordinator."""

import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.ports import free_port
from live.programs import eventually
from transports.certificates import Certificate

FOLDER = Path(__file__).parents[2] / "examples" / "deploy"
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
    """What a file has to name here: ports, and the files of a certificate."""

    folder: Path
    port: int
    coordinator: int
    certificate: Certificate


def nginx(here: Replacements) -> list[str]:
    """Write the configuration; return the command that checks or runs it."""
    text = (FOLDER / "nginx.conf").read_text()
    for old, new in (
        ("127.0.0.1:4010", f"127.0.0.1:{here.coordinator}"),
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


def caddy(here: Replacements) -> list[str]:
    """Write the configuration; return the command that checks or runs it."""
    text = (FOLDER / "Caddyfile").read_text()
    tls = f"tls {here.certificate.file} {here.certificate.key}"
    for old, new in (
        ("127.0.0.1:4010", f"127.0.0.1:{here.coordinator}"),
        (
            f"\n{NAME} {{",
            f"\nhttps://localhost:{here.port} {{\n\tbind 127.0.0.1\n\t{tls}",
        ),
    ):
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
    kind: str, folder: Path, coordinator: int, certificate: Certificate
) -> Iterator[str]:
    """Run a reverse proxy in front of a coordinator; yield its URL."""
    here = Replacements(folder, free_port(), coordinator, certificate)
    command = WRITERS[kind](here)
    if kind == "nginx":
        checked, run = [*command, "-t"], [*command, "-g", "daemon off;"]
    else:
        flags = ["--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]
        checked, run = [*command, "validate", *flags], [*command, "run", *flags]
    subprocess.run(checked, check=True, capture_output=True)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(run, stdin=subprocess.DEVNULL, stderr=log)
    try:
        eventually(lambda: _listens(here.port), f"{kind} listens")
        yield f"https://localhost:{here.port}"
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False
