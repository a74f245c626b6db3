"""Browsers that are signed in: a cookie stands for an API key, until the session ends.

A cookie has a random value, and only its SHA-256 is kept.  The browser sends it with
every request to this host, whichever page makes the request, so it is accepted from the
coordinator's own pages alone.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from aiohttp import web

from shoal.domain.credentials import DAY, BrowserSession, Key, digest_of
from shoal.domain.errors import Forbidden, StoreError
from shoal.gateway.http.web_origins import PagePolicy, host_port
from shoal.store.port import SignInCode, SignInStore

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


@dataclass(slots=True, eq=False)
class BrowserSessions:
    """The sessions of browsers, and the codes that begin one.

    Sessions are in memory, and changes of them in the store, too, from which the next
    process reads them.  Times are Unix seconds.
    """

    _store: SignInStore
    _pages: PagePolicy = PagePolicy()  # noqa: RUF009  # it is frozen
    _sessions: dict[bytes, BrowserSession] = field(default_factory=dict)  # oldest first
    # Changes by digest; None: it has ended.  Each write has all that failed before.
    _unstored: dict[bytes, BrowserSession | None] = field(default_factory=dict)

    async def open(self) -> None:
        """Read the sessions of before the start.  Raises StoreError."""
        self._sessions = {each.digest: each for each in await self._store.sessions()}

    async def add_code(self, code: str, key: Key, at: float) -> float:
        """Let a new code sign in as a key, once; return when it expires.

        Raises StoreError.
        """
        expires_at = at + CODE_LIFETIME
        new = SignInCode(digest_of(code), key.digest, expires_at)
        await self._store.add_code(new, CODES_MAX)
        return expires_at

    async def redeem(self, code: str, at: float) -> bytes | None:
        """Return the digest of the key of a code, which ends by that; None: no code.

        Raises StoreError.
        """
        found = await self._store.redeem(digest_of(code))
        return found.key_digest if found is not None and at < found.expires_at else None

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
        self._sessions[session.digest] = self._unstored[session.digest] = session
        everyone = list(self._sessions.values())
        # No secret: the digest of a key that is known by now.
        of_key = [each for each in everyone if each.key_digest == key.digest]
        self._drop([*of_key[:-OF_KEY_MAX], *everyone[:-SESSIONS_MAX]])
        await self._write()
        return session

    async def end(self, session: BrowserSession) -> None:
        """End a session.  Ending it again changes nothing."""
        self._drop([session])
        await self._write()

    async def end_all_of(self, key: Key) -> None:
        """End all sessions of a key."""
        # No secret: an operator ends them.
        self._drop([x for x in self._sessions.values() if x.key_digest == key.digest])
        await self._write()

    def drop_ended(self, at: float) -> None:
        """Forget the sessions that have expired."""
        self._drop([each for each in self._sessions.values() if at >= each.expires_at])

    def _drop(self, ended: Iterable[BrowserSession]) -> None:
        for each in ended:
            if self._sessions.pop(each.digest, None) is not None:
                self._unstored[each.digest] = None

    async def _write(self) -> None:
        """Return when the store has all changes until now; log why it has not."""
        # Not cancelled with the request: a session that ended would begin again at the
        # next start.
        await asyncio.shield(self._write_all())

    async def _write_all(self) -> None:
        changes = self._unstored.copy()
        try:
            await self._store.write_sessions(changes)
        except StoreError as error:
            log.warning(
                "a restart signs some browsers out, or in again, unless others sign in "
                "or out before: %s",
                error.located,
            )
            return
        for digest, change in changes.items():
            if self._unstored.get(digest) is change:
                self._unstored.pop(digest, None)


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
