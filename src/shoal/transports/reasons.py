"""Why a server cannot be had over HTTP, in words for people."""

import os
import socket

from aiohttp import (
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientConnectorSSLError,
    ServerDisconnectedError,
    ServerFingerprintMismatch,
)

HANGS_UP = (
    "it hangs up: with a certificate its URL begins with https:// or wss://, without "
    "one with http:// or ws://"
)


def why(error: Exception) -> str:
    """Return what an error of ``aiohttp`` means, and what may help."""
    match error:
        case ServerFingerprintMismatch():
            return (
                "it has another certificate than the token names: someone else answers "
                "there, or it was renewed; ask for a new token"
            )
        case ClientConnectorCertificateError():
            said = error.certificate_error
            return (
                "its certificate leads to no authority that is known here "
                f"({getattr(said, 'verify_message', said)}); a token that the "
                "coordinator prints names its certificate"
            )
        case ClientConnectorSSLError():
            return (
                "it does not speak TLS: without, its URL begins with http:// or ws://"
            )
        case ServerDisconnectedError():
            return HANGS_UP
        case ClientConnectorError():
            return _of_system(error.os_error)
        case TimeoutError():
            return "no answer"
        case _:
            return str(error) or type(error).__name__


def _of_system(error: OSError) -> str:
    # What the event loop says in place of the system's words has the address again.
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, ConnectionError):
        return HANGS_UP
    if isinstance(error, socket.gaierror) or not error.errno:
        return error.strerror or str(error)
    return os.strerror(error.errno)
