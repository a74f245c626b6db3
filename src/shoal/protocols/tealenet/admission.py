"""Who may come in: by a join token, by the cluster's passcode, or because all may.

Source of the passcode's check: what real peers do; see ``docs/protocols/tealenet.md``.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.domain.errors import NotAdmitted, Unavailable
from shoal.protocols.crowd import BY_NO_TOKEN
from shoal.protocols.session import Admission, Applicant, Pass
from shoal.protocols.tealenet.ourselves import Ourselves

CLOSED = (
    "no peer is let in here without a passcode or a join token: have the coordinator "
    "started with --tealenet-passcode or --tealenet-open, or join as a worker with "
    "--token"
)
PASSCODES: Mapping[tuple[bool, bool], str] = {
    (True, True): "the cluster here has another passcode: check --passcode",
    (True, False): "the cluster here has a passcode: present it (--passcode), or a "
    "join token (--token)",
    (False, True): "the cluster here has no passcode, and the peer has one: have the "
    "coordinator started with --tealenet-passcode",
}
"""What is wrong where passcodes differ, by who has one: we, and the peer."""

NO_ASKING = (
    "who joined by a token is here to work: to ask, use the coordinator's HTTP API "
    "with a key, or have it started with --tealenet-passcode"
)


@dataclass(frozen=True, slots=True)
class Presented:
    """What a peer presents in order to be let in.

    ``passcode`` is the hash that it shows, and None if it shows none.  ``named``: an
    operator named its address.  ``greets``: it says hello before anything else, so that
    it could have shown a passcode.
    """

    name: str
    models: frozenset[str] = frozenset()
    token: str = ""
    passcode: str | None = None
    address: str = ""
    named: bool = False
    greets: bool = True


@dataclass(frozen=True, slots=True)
class Leave:
    """Leave to serve, and perhaps to ask.

    ``models`` are those that it may offer; None: any.
    """

    asks: bool
    admitted: Pass = BY_NO_TOKEN
    models: frozenset[str] | None = None


def admit(own: Ourselves, peer: Presented) -> Leave:
    """Decide whether a peer may come in, and as what.

    Raises NotAdmitted, saying why not and what to do.
    """
    if peer.address and (peer.token or peer.passcode is not None):
        try:
            own.guesses.check(peer.address)
        except Unavailable as error:
            raise NotAdmitted(str(error)) from error
    if peer.token and own.admission is not None:
        return _by_token(own.admission, peer)
    if own.token and peer.passcode is None:
        return Leave(asks=True)  # the other end lets us in by our token
    if not same_passcode(own.passcode, peer.passcode):
        if peer.greets or peer.passcode is not None or not own.open:
            given = (own.passcode is not None, peer.passcode is not None)
            if all(given) and peer.address:
                own.guesses.failed(peer.address)
            raise NotAdmitted(PASSCODES[given])
    elif own.passcode is not None:
        return Leave(asks=True)
    if own.open or own.admission is None:
        return Leave(asks=True)
    return _by_nothing(own.admission, peer)


def lets_strangers_in(own: Ourselves) -> bool:
    """Say whether a node that presents nothing may come in."""
    try:
        admit(own, Presented("", greets=False))
    except NotAdmitted:
        return False
    return True


def same_passcode(own: str | None, theirs: str | None) -> bool:
    """Say whether two peers have the same passcode, by its hashes; none is one too.

    It takes as long whatever the hashes are.
    """
    if own is None or theirs is None:
        return own is theirs
    return hmac.compare_digest(own.encode(), theirs.encode(errors="replace"))


def _by_token(admission: Admission, peer: Presented) -> Leave:
    """Let a worker in, with those of its models that the token is for."""
    try:
        try:
            # First without models: a token that is no good is to be counted once.
            admitted = admission(_applicant(peer, frozenset()))
        except Unavailable as error:  # the address has guessed too often
            raise NotAdmitted(str(error)) from error
        allowed = permitted(admission, peer, peer.models)
        if peer.models and not allowed:
            admission(_applicant(peer, peer.models))  # which says why not
    except NotAdmitted as error:
        raise NotAdmitted(f"{error}: check --token") from error
    return Leave(asks=False, admitted=admitted, models=allowed)


def permitted(
    admission: Admission, peer: Presented, models: frozenset[str]
) -> frozenset[str]:
    """Return those of the models that the peer's token is for."""

    def is_for(some: frozenset[str]) -> bool:
        try:
            admission(_applicant(peer, some))
        except (NotAdmitted, Unavailable):
            return False
        return True

    if is_for(models):
        return models
    return frozenset(model for model in models if is_for(frozenset({model})))


def _applicant(peer: Presented, models: frozenset[str]) -> Applicant:
    return Applicant(peer.token, peer.name, models, peer.address)


def _by_nothing(admission: Admission, peer: Presented) -> Leave:
    """Let a peer in that presents nothing, if anybody may come in.

    One whose address an operator gave may serve all the same.
    """
    try:
        admission(_applicant(peer, peer.models))
    except (NotAdmitted, Unavailable) as error:
        if peer.named:
            return Leave(asks=False)
        raise NotAdmitted(CLOSED) from error
    return Leave(asks=True)
