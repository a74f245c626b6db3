"""Admission of peers: by join token, by the cluster's passcode, or open to all.

Source of the passcode's check: what real peers do; see ``docs/protocols/tealenet.md``.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.domain.errors import NotAdmitted, Unavailable
from shoal.protocols.seam.multi_peer import NO_JOIN_TOKEN
from shoal.protocols.seam.session import AdmissionCheck, AdmissionGrant, JoinRequest
from shoal.protocols.tealenet.local_node import TealeLocalNode

CREDENTIALS_REQUIRED = (
    "no peer is let in here without a passcode or a join token: have the coordinator "
    "started with --tealenet-passcode or --tealenet-open, or join as a worker with "
    "--token"
)
PASSCODE_ERRORS: Mapping[tuple[bool, bool], str] = {
    (True, True): "the cluster here has another passcode: check --passcode",
    (True, False): "the cluster here has a passcode: present it (--passcode), or a "
    "join token (--token)",
    (False, True): "the cluster here has no passcode, and the peer has one: have the "
    "coordinator started with --tealenet-passcode",
}
"""What is wrong where passcodes differ, by who has one: we, and the peer."""

MAY_NOT_SUBMIT = (
    "who joined by a token is here to work: to ask, use the coordinator's HTTP API "
    "with a key, or have it started with --tealenet-passcode"
)


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """What a peer presents in order to be let in.

    ``passcode`` is the hash that it shows, and None if it shows none.  ``configured``:
    an operator named its address.  ``sends_hello``: it says hello before anything else,
    so that it could have shown a passcode.
    """

    name: str
    models: frozenset[str] = frozenset()
    token: str = ""
    passcode: str | None = None
    address: str = ""
    configured: bool = False
    sends_hello: bool = True


@dataclass(frozen=True, slots=True)
class PeerPermissions:
    """Leave to serve, and perhaps to ask.

    ``models`` are those that it may offer; None: any.
    """

    submits_jobs: bool
    grant: AdmissionGrant = NO_JOIN_TOKEN
    models: frozenset[str] | None = None


def admit(local: TealeLocalNode, peer: PeerCredentials) -> PeerPermissions:
    """Decide whether a peer may come in, and as what.

    Raises NotAdmitted, saying why not and what to do.
    """
    if peer.address and (peer.token or peer.passcode is not None):
        try:
            local.throttle.check(peer.address)
        except Unavailable as error:
            raise NotAdmitted(str(error)) from error
    if peer.token and local.admission is not None:
        return _admit_by_token(local.admission, peer)
    if local.token and peer.passcode is None:
        return PeerPermissions(
            submits_jobs=True
        )  # the other end lets us in by our token
    if not passcodes_match(local.passcode, peer.passcode):
        if peer.sends_hello or peer.passcode is not None or not local.open:
            given = (local.passcode is not None, peer.passcode is not None)
            if all(given) and peer.address:
                local.throttle.failed(peer.address)
            raise NotAdmitted(PASSCODE_ERRORS[given])
    elif local.passcode is not None:
        return PeerPermissions(submits_jobs=True)
    if local.open or local.admission is None:
        return PeerPermissions(submits_jobs=True)
    return _admit_anonymous(local.admission, peer)


def admits_anonymous(local: TealeLocalNode) -> bool:
    """Say whether a node that presents nothing may come in."""
    try:
        admit(local, PeerCredentials("", sends_hello=False))
    except NotAdmitted:
        return False
    return True


def passcodes_match(own: str | None, theirs: str | None) -> bool:
    """Say whether two peers have the same passcode, by its hashes; none is one too.

    It takes as long whatever the hashes are.
    """
    if own is None or theirs is None:
        return own is theirs
    return hmac.compare_digest(own.encode(), theirs.encode(errors="replace"))


def _admit_by_token(
    admission: AdmissionCheck, peer: PeerCredentials
) -> PeerPermissions:
    """Let a worker in, with those of its models that the token is for."""
    try:
        try:
            # First without models: a token that is no good is to be counted once.
            admitted = admission(_join_request(peer, frozenset()))
        except Unavailable as error:  # the address has guessed too often
            raise NotAdmitted(str(error)) from error
        allowed = permitted_models(admission, peer, peer.models)
        if peer.models and not allowed:
            admission(_join_request(peer, peer.models))  # which says why not
    except NotAdmitted as error:
        raise NotAdmitted(f"{error}: check --token") from error
    return PeerPermissions(submits_jobs=False, grant=admitted, models=allowed)


def permitted_models(
    admission: AdmissionCheck, peer: PeerCredentials, models: frozenset[str]
) -> frozenset[str]:
    """Return those of the models that the peer's token is for."""

    def is_for(some: frozenset[str]) -> bool:
        try:
            admission(_join_request(peer, some))
        except (NotAdmitted, Unavailable):
            return False
        return True

    if is_for(models):
        return models
    return frozenset(model for model in models if is_for(frozenset({model})))


def _join_request(peer: PeerCredentials, models: frozenset[str]) -> JoinRequest:
    return JoinRequest(peer.token, peer.name, models, peer.address)


def _admit_anonymous(
    admission: AdmissionCheck, peer: PeerCredentials
) -> PeerPermissions:
    """Let a peer in that presents nothing, if anybody may come in.

    One whose address an operator gave may serve all the same.
    """
    try:
        admission(_join_request(peer, peer.models))
    except (NotAdmitted, Unavailable) as error:
        if peer.configured:
            return PeerPermissions(submits_jobs=False)
        raise NotAdmitted(CREDENTIALS_REQUIRED) from error
    return PeerPermissions(submits_jobs=True)
