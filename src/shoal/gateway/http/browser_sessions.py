"""Browsers that are signed in: a cookie stands for an API key, until the session ends.

A cookie has a random value, and only its SHA-256 is kept.  The browser sends it with
every request to this host, whichever page makes the request, so it is accepted from the
coordinator's own pages alone.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from shoal.config.session_file import SessionFile
from shoal.domain.credentials import DAY, BrowserSession, Key, digest_of
from shoal.domain.errors import Forbidden
from shoal.gateway.http.web_origins import PagePolicy, host_port

SESSION_LIFETIME = 7 * DAY  # seconds
SESSIONS_MAX = 1000  # the oldest one ends
OF_KEY_MAX = 20  # sessions of one key; its oldest one ends

CODE_LIFETIME = 3600.0  # seconds
CODES_MAX = 100  # codes that were not used; the oldest one ends

PAGE_HEADER = "x-shoal-page"
"""A header that pages of other sites cannot send: browsers would ask first."""

SAFE_METHODS = frozenset({"GET", "HEAD"})
COOKIE = "shoal-session"
SECURE_PREFIX = "__Host-"  # browsers accept it over HTTPS alone, and of one host

log = logging.getLogger("shoal.gateway")


@dataclass(slots=True)
class SignInCodes:
    """The codes of one-time links, by their digests."""

    _codes: dict[bytes, tuple[bytes, float]] = field(default_factory=dict)

    def add(self, code: str, key: Key, at: float) -> float:
        """Let a new code sign in as a key, once; return when it expires."""
        expires_at = at + CODE_LIFETIME
        self._codes[digest_of(code)] = (key.digest, expires_at)
        if len(self._codes) > CODES_MAX:
            del self._codes[next(iter(self._codes))]
        return expires_at

    def redeem(self, code: str, at: float) -> bytes | None:
        """Return the digest of the key of a code, which ends by that; None: no code."""
        found = self._codes.pop(digest_of(code), None)
        return found[0] if found is not None and at < found[1] else None


@dataclass(slots=True, eq=False)
class BrowserSessions:
    """The sessions of browsers, and the codes that begin one.

    They end with the process, unless there is a ``file``.  Times are Unix seconds.
    """

    _pages: PagePolicy = PagePolicy()  # noqa: RUF009  # it is frozen
    _file: SessionFile | None = None
    codes: SignInCodes = field(default_factory=SignInCodes)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _sessions: dict[bytes, BrowserSession] = field(default_factory=dict)  # oldest first
    _changes: int = 0
    _written: int = 0  # the changes that are in the file

    async def open(self) -> None:
        """Read the sessions of before the start."""
        if self._file is None:
            return
        try:
            kept = await asyncio.to_thread(self._file.read)
        except (OSError, ValueError) as error:
            log.warning("browsers sign in again: %s: %s", self._file.path, error)
            return
        self._sessions = {each.digest: each for each in kept[-SESSIONS_MAX:]}

    def find(
        self, headers: Mapping[str, str], at: float, *, secure: bool
    ) -> BrowserSession | None:
        """Return the session of a request's cookie, if it has not ended.

        ``secure``: the request came over TLS.
        """
        host = headers.get("Host", "")
        names = [cookie_name(host, secure=True)]
        if not secure:
            # Behind a proxy, a GET does not show whether the browser used HTTPS.
            names.append(cookie_name(host, secure=False))
        sent = dict(_cookies(headers.get("Cookie", "")))
        for name in names:  # the safest first
            session = self._sessions.get(digest_of(sent.get(name, "")))
            if session is not None and at < session.expires_at:
                return session
        return None

    def is_open(self, session: BrowserSession, at: float) -> bool:
        """Say whether a session has not ended."""
        # No secret: the digest of a random cookie, which reveals nothing.
        return session.digest in self._sessions and at < session.expires_at

    def check_page(self, request: web.Request) -> None:
        """Raise Forbidden if a request may have been made by another site's page."""
        self._pages.check_own_page(request.headers)
        if request.method not in SAFE_METHODS and PAGE_HEADER not in request.headers:
            raise Forbidden(
                "requests of a page that change something need the header "
                f"{PAGE_HEADER}: 1"
            )

    async def begin(self, value: str, key: Key, at: float) -> BrowserSession:
        """Begin the session of a cookie with a new random value."""
        ends = [at + SESSION_LIFETIME, key.expires_at or float("inf")]
        session = BrowserSession(digest_of(value), key.digest, min(ends))
        self.drop_ended(at)
        self._sessions[session.digest] = session
        everyone = list(self._sessions.values())
        # No secret: the digest of a key that is known by now.
        of_key = [each for each in everyone if each.key_digest == key.digest]
        for each in (*of_key[:-OF_KEY_MAX], *everyone[:-SESSIONS_MAX]):
            self._sessions.pop(each.digest, None)
        await self._write()
        return session

    async def end(self, session: BrowserSession) -> None:
        """End a session.  Ending it again changes nothing."""
        if self._sessions.pop(session.digest, None) is not None:
            await self._write()

    async def end_all_of(self, key: Key) -> None:
        """End all sessions of a key."""
        ended = [
            digest
            for digest, each in self._sessions.items()
            if each.key_digest == key.digest  # No secret: an operator ends them.
        ]
        for digest in ended:
            del self._sessions[digest]
        if ended:
            await self._write()

    def drop_ended(self, at: float) -> None:
        """Forget the sessions that have expired."""
        for each in [*self._sessions.values()]:
            if at >= each.expires_at:
                del self._sessions[each.digest]

    async def _write(self) -> None:
        """Return when the file has all changes until now; log why it has not."""
        if self._file is None:
            return
        self._changes += 1
        # Not cancelled with the request: a session that ended would begin again at the
        # next start.
        await asyncio.shield(
            asyncio.get_running_loop().run_in_executor(
                None, self._write_now, self._file, self._changes
            )
        )

    def _write_now(self, file: SessionFile, mine: int) -> None:
        with self._writing:
            if self._written >= mine:
                return  # many sign in at a time, and one thread writes for them
            changes = self._changes  # before the sessions, which may change meanwhile
            try:
                file.write([*self._sessions.values()])
            except OSError as error:
                log.warning(
                    "browsers sign in again after a restart: %s: %s",
                    file.path,
                    error.strerror,
                )
            self._written = changes


def set_cookie(
    request: web.Request, response: web.Response, value: str, seconds: float
) -> None:
    """Set a session's cookie for some seconds; 0: delete it."""
    secure = is_encrypted(request)
    response.set_cookie(
        cookie_name(request.headers.get("Host", ""), secure=secure),
        value,
        max_age=int(seconds),
        path="/",
        secure=secure,
        httponly=True,
        samesite="Strict",
    )


def is_encrypted(request: web.Request) -> bool:
    """Say whether the browser sent a request over HTTPS, perhaps to a reverse proxy.

    Its own statement about that is the page's ``Origin``: no proxy has to be trusted
    for it.
    """
    return request.secure or request.headers.get("Origin", "").startswith("https:")


def cookie_name(host: str, *, secure: bool) -> str:
    """Return the name of the cookie at the ``Host`` that a request was sent to.

    It has the port: browsers send the cookies of a host to all of its ports, and the
    coordinators there would sign each other's users out.
    """
    port = host_port(host)
    name = COOKIE if port is None else f"{COOKIE}-{port}"
    return SECURE_PREFIX + name if secure else name


def _cookies(header: str) -> Iterator[tuple[str, str]]:
    for each in header.split(";"):
        name, _, value = each.partition("=")
        yield name.strip(), value.strip()
