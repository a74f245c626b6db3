"""What we ask others to sign, and what we do not sign for others.

A node of a fleet answers a challenge of 32 bytes with its HMAC under the fleet's key,
and has to do so before it knows who asks (v1, v2).  So whoever asks gets any 32 bytes
signed, but for three kinds:

* A challenge of a node of ours has a mark, and nobody who has drawn it would put it to
  another of ours in v1 or v2: they speak the strong handshake.  Seeing one there,
  either end knows that somebody in between took the offer out, or hands on what another
  node wants answered.  So nodes of ours answer none of each other's, whoever carries
  it.  (The same idea as in RFC 8446, section 4.1.3, on downgrades.)
* What could be the signed part of a heartbeat: ``id:nonce`` or ``id:nonce:hardware``.
* What we have put to others ourselves, lately: see ``outstanding``.

What remains for a stranger: signatures of 32 bytes that look random, each of which lets
him try tokens against it at home; heartbeats without hardware of others whose id has
fewer than ``NAME_MIN`` bytes, as only nodes of ours may have it, or begins with a
control character (the suffix does); and to hand a challenge on to a node that is not
ours.  For each he shows his address, and is counted as one who has guessed.
"""

from hashlib import sha256

from shoal.protocols.macfleet.handshake.steps import CHALLENGE, Own, Strength

MARK = sha256(b"shoal macfleet challenge v1\n").digest()[:8]
"""How a challenge ends that was drawn by one of ours."""

NAME_MIN = 8
"""Bytes of an id from which on a heartbeat's beginning is told from chance.

Others' ids end with a hyphen and eight hexadecimal digits.  At this length one in
80,000 challenges drawn at random looks like one; at a length of one, one in 400 would.
"""


def drawn(own: Own) -> bytes:
    """Draw a challenge."""
    if Strength.STRONG not in own.accepts:
        return own.draw(CHALLENGE)
    return own.draw(CHALLENGE - len(MARK)) + MARK


def is_ours(challenge: bytes) -> bool:
    """Say whether a node drew it that speaks the strong handshake."""
    return challenge.endswith(MARK)


def like_heartbeat(challenge: bytes, own_id: str) -> bool:
    """Say whether a challenge could be what a heartbeat signs, ours or another's.

    That is an id (text without white space), a colon, a nonce of any bytes, and perhaps
    a colon and a JSON object.  Text from end to end is no challenge either: our
    hardware is signed with an id after the challenge, and a colon.
    """
    name = _text_of(challenge)
    if len(name) == len(challenge):
        return True
    if name.rfind(b":") >= NAME_MIN or name.startswith(own_id.encode() + b":"):
        return True
    first = name.find(b":")
    return first > 0 and _has_object(challenge[first + 1 :])


def _text_of(data: bytes) -> bytes:
    """Return the beginning of the bytes that is printable text without white space."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        text = data[: error.start].decode()
    for place, letter in enumerate(text):
        if letter == " " or not letter.isprintable():
            return text[:place].encode()
    return text.encode()


def _has_object(rest: bytes) -> bool:
    """Say whether there is a colon, and a JSON object from there to the end."""
    return rest.rstrip().endswith(b"}") and any(
        rest[place + 1 :].lstrip().startswith(b"{")
        for place, byte in enumerate(rest)
        if byte == ord(":")
    )
