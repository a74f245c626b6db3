"""Admission of peers: by join token, by the cluster's passcode, or open to all.

Real peers compare passcodes in the same way; see ``docs/protocols/tealenet.md``.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.domain.errors import NotAdmitted, Unavailable
from shoal.protocols.seam.admission import (
    NO_JOIN_TOKEN,
    AdmissionCheck,
    AdmissionGrant,
    JoinRequest,
    TokenProof,
)
from shoal.protocols.seam.token_proof import NOT_PROVEN
from shoal.protocols.tealenet.local_node import TealeLocalNode

CREDENTIALS_REQUIRED = (
    "a peer needs a passcode or a join token here: start the coordinator with "
    "--tealenet-passcode or --tealenet-open, or join as a worker with --token"
)
TOKEN_REQUIRED = (
    "a join token is required: give --token, as the line that `shoal serve` prints for "
    "another machine has it"
)
PASSCODE_ERRORS: Mapping[tuple[bool, bool], str] = {
    (True, True): "the cluster has another passcode: check --passcode",
    (True, False): "the cluster requires a passcode (--passcode) or a join token "
    "(--token)",
    (False, True): "the cluster has no passcode, but the peer has one: start the "
    "coordinator with --tealenet-passcode",
}
"""Errors for different passcodes, by whether this end and the peer have one."""

MAY_NOT_SUBMIT = (
    "a peer that joined with a token may not submit jobs: use the coordinator's HTTP "
    "API with a key, or start it with --tealenet-passcode"
)


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """A peer's credentials.

    ``passcode`` is the hash that it presents, or None.  ``proves_token``: this end has
    proved its token to the peer, and the peer has proved the same.  ``configured``: its
    address comes from the configuration.  ``sends_hello``: it starts with a hello, in
    which it could have presented a passcode.  ``is_worker``: it is a worker of Shoal's.
    """

    name: str
    models: frozenset[str] = frozenset()
    token: str | TokenProof = ""
    passcode: str | None = None
    proves_token: bool = False
    address: str = ""
    configured: bool = False
    sends_hello: bool = True
    is_worker: bool = False


@dataclass(frozen=True, slots=True)
class PeerPermissions:
    """Permission to serve, and perhaps to submit jobs.

    ``models``: those that the peer may offer; None: any.  ``anonymous``: it is admitted
    only because every peer is.
    """

    submits_jobs: bool
    grant: AdmissionGrant = NO_JOIN_TOKEN
    models: frozenset[str] | None = None
    anonymous: bool = False


def admit(local: TealeLocalNode, peer: PeerCredentials) -> PeerPermissions:
    """Admit a peer and return its permissions.

    Raises NotAdmitted with the reason and what to do about it.
    """
    if peer.address and (peer.token or peer.passcode is not None):
        try:
            local.throttle.check(peer.address)
            if peer.passcode is not None and local.weak_passcode:
                local.throttle.check_passcode(peer.address)
        except Unavailable as error:
            raise NotAdmitted(str(error)) from error
    if peer.token and local.admission is not None:
        return _admit_by_token(local.admission, peer)
    if local.token and not local.plain and not peer.proves_token:
        raise NotAdmitted(NOT_PROVEN)
    if local.token and peer.passcode is None:
        # A worker's coordinator: it admits this end by the token.
        return PeerPermissions(submits_jobs=True)
    if not passcodes_match(local.passcode, peer.passcode):
        if peer.sends_hello or peer.passcode is not None or not local.open:
            has_passcode = (local.passcode is not None, peer.passcode is not None)
            if all(has_passcode) and peer.address:
                local.throttle.failed(peer.address)
            raise NotAdmitted(PASSCODE_ERRORS[has_passcode])
    elif local.passcode is not None:
        return PeerPermissions(submits_jobs=True)
    if local.open or local.admission is None:
        return PeerPermissions(submits_jobs=True, anonymous=True)
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


def _admit_by_token(
    admission: AdmissionCheck, peer: PeerCredentials
) -> PeerPermissions:
    """Admit a worker with those of its models that its token permits."""
    try:
        try:
            # First without models, so that a wrong token counts once.
            grant = admission(_join_request(peer, frozenset()))
        except Unavailable as error:  # too many wrong tokens from this address
            raise NotAdmitted(str(error)) from error
        allowed = permitted_models(admission, peer, peer.models)
        if peer.models and not allowed:
            admission(_join_request(peer, peer.models))  # raises with the reason
    except NotAdmitted as error:
        raise NotAdmitted(f"{error}: check --token") from error
    return PeerPermissions(submits_jobs=False, grant=grant, models=allowed)


def permitted_models(
    admission: AdmissionCheck, peer: PeerCredentials, models: frozenset[str]
) -> frozenset[str]:
    """Return those of the models that the peer's token permits."""

    def permits(subset: frozenset[str]) -> bool:
        try:
            admission(_join_request(peer, subset))
        except (NotAdmitted, Unavailable):
            return False
        return True

    if permits(models):
        return models
    return frozenset(model for model in models if permits(frozenset({model})))


def _join_request(peer: PeerCredentials, models: frozenset[str]) -> JoinRequest:
    return JoinRequest(peer.token, peer.name, models, peer.address)


def _admit_anonymous(
    admission: AdmissionCheck, peer: PeerCredentials
) -> PeerPermissions:
    """Admit a peer without credentials if the coordinator needs none.

    A peer at a configured address may serve in any case.
    """
    try:
        admission(_join_request(peer, peer.models))
    except (NotAdmitted, Unavailable) as error:
        if peer.configured:
            return PeerPermissions(submits_jobs=False)
        required = TOKEN_REQUIRED if peer.is_worker else CREDENTIALS_REQUIRED
        raise NotAdmitted(required) from error
    return PeerPermissions(submits_jobs=True)
