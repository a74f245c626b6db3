"""Admission of peers: by the cluster's passcode, or open to all.

Real peers compare passcodes in the same way; see ``docs/protocols/tealenet.md``.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.domain.errors import NotAdmitted, Unavailable
from shoal.protocols.seam.admission import AdmissionCheck, JoinRequest
from shoal.protocols.tealenet.local_node import TealeLocalNode

CREDENTIALS_REQUIRED = (
    "a peer needs a passcode here: start the coordinator with --tealenet-passcode or "
    "--tealenet-open"
)
PASSCODE_ERRORS: Mapping[tuple[bool, bool], str] = {
    (True, True): "the cluster has another passcode: check --passcode",
    (True, False): "the cluster requires a passcode: give --passcode",
    (False, True): "the cluster has no passcode, but the peer has one: start the "
    "coordinator with --tealenet-passcode",
}
"""Errors for different passcodes, by whether this end and the peer have one."""

MAY_NOT_SUBMIT = (
    "a peer without the cluster's passcode may not submit jobs: use the coordinator's "
    "HTTP API with a key, or start it with --tealenet-passcode"
)


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """A peer's credentials.

    ``passcode`` is the hash that it presents, or None.  ``configured``: its address
    comes from the configuration.  ``sends_hello``: it starts with a hello, in which it
    could have presented a passcode.
    """

    name: str
    models: frozenset[str] = frozenset()
    passcode: str | None = None
    address: str = ""
    configured: bool = False
    sends_hello: bool = True


def admit(local: TealeLocalNode, peer: PeerCredentials) -> bool:
    """Admit a peer to serve; return whether it may submit jobs as well.

    Raises NotAdmitted with the reason and what to do about it.
    """
    if peer.address and peer.passcode is not None:
        try:
            local.throttle.check(peer.address)
            if local.weak_passcode:
                local.throttle.check_passcode(peer.address)
        except Unavailable as error:
            raise NotAdmitted(str(error)) from error
    if not passcodes_match(local.passcode, peer.passcode):
        if peer.sends_hello or not local.open:
            has_passcode = (local.passcode is not None, peer.passcode is not None)
            if all(has_passcode) and peer.address:
                local.throttle.failed(peer.address)
            raise NotAdmitted(PASSCODE_ERRORS[has_passcode])
    elif local.passcode is not None:
        return True
    if local.open or local.admission is None:
        return True
    return _admit_anonymous(local.admission, peer)


def admits_anonymous(local: TealeLocalNode) -> bool:
    """Return whether a node without credentials is admitted."""
    try:
        admit(local, PeerCredentials("", sends_hello=False))
    except NotAdmitted:
        return False
    return True


def passcodes_match(own: str | None, theirs: str | None) -> bool:
    """Compare two passcodes by their hashes, in constant time; two Nones are equal."""
    if own is None or theirs is None:
        return own is theirs
    return hmac.compare_digest(own.encode(), theirs.encode(errors="replace"))


def _admit_anonymous(admission: AdmissionCheck, peer: PeerCredentials) -> bool:
    """Admit a peer without credentials if the coordinator needs none.

    A peer at a configured address may serve in any case.
    """
    try:
        admission(JoinRequest("", peer.name, peer.models, peer.address))
    except (NotAdmitted, Unavailable) as error:
        if peer.configured:
            return False
        raise NotAdmitted(CREDENTIALS_REQUIRED) from error
    return True
