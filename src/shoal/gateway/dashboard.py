"""Serves the files of the dashboard, which are data of the package.

All of them are read once, so a path is looked up in a table and never on the disk.
"""

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType

from aiohttp import web

from shoal.domain.errors import NotFound
from shoal.gateway.http.operation import Operations
from shoal.gateway.http.responses import BYTES_TYPE, HTML_TYPE, TEXT_TYPE

api = Operations()

DASHBOARD_FILE = "(?!session$|links$).+"  # not the dashboard's own paths
FOLDER = "dashboard_files"  # in the package
INDEX = "index.html"
GZIP_MIN = 512  # bytes; below, compression saves no packet
GZIP_LEVEL = 9
TAG_DIGITS = 32  # hexadecimal digits of an ETag

MEDIA = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "md": "text/plain; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "webmanifest": "application/manifest+json",
}
"""The media types of files, by the ends of their names; others are bytes."""

PERMISSIONS = ("camera", "display-capture", "geolocation", "microphone", "payment")
"""Abilities of browsers that the dashboard does without."""

SECURITY_HEADERS = {
    # No inline script or style, nothing of another site, in no frame.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; "
        "img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; "
        "manifest-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": ", ".join(f"{each}=()" for each in PERMISSIONS),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

# Of other pages browsers ignore it, with an error on the console.
ENCRYPTED_HEADERS = {"Cross-Origin-Opener-Policy": "same-origin"}

CACHING = {
    # The names have no version: a browser asks each time, and usually gets a 304.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class DashboardFile:
    """A file; ``gzipped`` is None if compression does not pay."""

    media: str
    body: bytes
    gzipped: bytes | None
    tag: str

    @classmethod
    def of(cls, name: str, body: bytes) -> "DashboardFile":
        """Return the file of a name, compressed if that pays."""
        media = MEDIA.get(name.rpartition(".")[2], BYTES_TYPE)
        gzipped = None
        if len(body) >= GZIP_MIN:
            compressed = gzip.compress(body, GZIP_LEVEL, mtime=0)
            gzipped = compressed if len(compressed) < len(body) * 0.9 else None
        tag = hashlib.sha256(body).hexdigest()[:TAG_DIGITS]
        return cls(media, body, gzipped, tag)


@cache
def dashboard_files() -> Mapping[str, DashboardFile]:
    """Return the files of the package, by path."""
    folder = resources.files("shoal") / FOLDER
    return read_files(folder) if folder.is_dir() else {}


def read_files(folder: Traversable) -> Mapping[str, DashboardFile]:
    """Read all files of a folder, by their paths in it."""
    files: dict[str, DashboardFile] = {}
    for each in folder.iterdir():
        if each.is_file():
            files[each.name] = DashboardFile.of(each.name, each.read_bytes())
        else:
            within = read_files(each)
            files.update({f"{each.name}/{path}": within[path] for path in within})
    return MappingProxyType(files)


@api.get("/", "The dashboard", media=HTML_TYPE, documented=False)
async def show_dashboard(request: web.Request) -> web.Response:
    return _answer(request, INDEX)


@api.get(
    "/dashboard/{path}",
    "A file of the dashboard",
    media=TEXT_TYPE,
    documented=False,
    pattern=DASHBOARD_FILE,
)
async def show_file(request: web.Request, path: str) -> web.Response:
    return _answer(request, path)


def _answer(request: web.Request, path: str) -> web.Response:
    """Raises NotFound."""
    file = dashboard_files().get(path)
    if file is None:
        raise NotFound(f"the dashboard has no file {path[:80]!a}")
    headers = SECURITY_HEADERS | CACHING
    if request.secure:
        headers |= ENCRYPTED_HEADERS
    body, tag = file.body, file.tag
    if file.gzipped is not None and _accepts_gzip(request):
        # Another representation has another tag (RFC 9110, section 8.8.3.3).
        body, tag = file.gzipped, f"{file.tag}-gzip"
        headers["Content-Encoding"] = "gzip"
    headers["ETag"] = f'"{tag}"'
    if any(each.value in (tag, "*") for each in request.if_none_match or ()):
        headers.pop("Content-Encoding", None)
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, headers=headers | {"Content-Type": file.media})


def _accepts_gzip(request: web.Request) -> bool:
    for listed in request.headers.getall("Accept-Encoding", []):
        for each in listed.split(","):
            coding, _, weight = each.replace(" ", "").lower().partition(";q=")
            if coding == "gzip":
                return weight.strip("0.") != "" or weight == ""
    return False
