"""Declares settings, and estimates how many guesses a secret among them withstands.

The estimate is what is left of ``length * log2(alphabet)``, from the secret's text
alone, without the characters that a guesser gets for free: repeats, runs such as
``1234``, and words that examples and defaults are made of.  It is impossible to tell a
random text from a quoted one by looking at it, so a phrase of a book passes: the
estimate finds carelessness, not cleverness.
"""

import math
import re
import string
from dataclasses import field
from typing import Any

BITS_MIN = 80
"""The bits of a secret that may be guessed at from other machines.

At a million guesses a second, half of them take more than 10 billion years.  Secrets
that this program generates have 160.
"""

SIZE_MAX = 256  # characters that are looked at; beyond them nothing is weak

GENERATED = re.compile("sk-shoal-|sk-|jt-")
"""What generated secrets begin with."""

COMMON_WORDS = re.compile(
    "qwertyuiop|qwerty|asdfghjkl|zxcvbnm|password|passwort|passcode|passphrase|secret"
    "|change[-_ ]?(?:me|this|it)|replace[-_ ]?(?:me|this)|insecure|letmein|welcome"
    "|example|default|administrator|admin|hunter2?|master|please|your|this|test|token"
    "|join|key|api|node|cluster|fleet|worker|shoal|correct|horse|battery|staple",
    re.IGNORECASE,
)
"""Words of examples, of defaults and of lists of leaked passwords."""

PUBLISHED = frozenset(
    {
        # Secrets of well-known documents that are long enough otherwise.
        "wjalrxutnfemi/k7mdeng/bpxrficyexamplekey",
        "a-string-secret-at-least-256-bits-long",
        "your-256-bit-secret",
        "09d25e094faa6ca2556c818166b7a9563b93f7099f6f0f4caa6cf63b88e8d3e7",
        "1qaz2wsx3edc4rfv5tgb6yhn7ujm",
        "0123456789abcdeffedcba9876543210",
        "thequickbrownfoxjumpsoverthelazydog",
    }
)
"""Published secrets, in lower case: of manuals, of keyboards and of proverbs."""


def setting(
    help: str,
    default: object,
    metavar: str = "",
    *,
    secret: bool = False,
    bearer: bool = True,
    everyday: bool = False,
) -> Any:
    """Declare a field of a configuration, with the help text of its flag.

    The default ``metavar`` is the last word of the field's name.  A ``secret`` should
    be readable only to its user, and is a ``bearer`` credential, see ``check_secrets``,
    unless it is for a server elsewhere.  ``everyday``: its flag is in the short help.
    """
    metadata = {
        "help": help,
        "metavar": metavar,
        "secret": secret,
        "bearer": secret and bearer,
        "everyday": everyday,
    }
    return field(default=default, metadata=metadata)


def is_guessable(secret: str) -> bool:
    """Return whether a secret has less than ``BITS_MIN`` bits, or is published."""
    return why_guessable(secret) is not None


def why_guessable(secret: str) -> str | None:
    """Return what makes a secret guessable; None: nothing that its text shows."""
    if secret.lower() in PUBLISHED:
        return "it is a published example"
    bits = estimated_bits(secret)
    if bits < BITS_MIN:
        return f"it has about {bits:.0f} bits, and {BITS_MIN} are needed"
    return None


def estimated_bits(secret: str) -> float:
    """Estimate the bits of a secret, see the module's docstring."""
    text = GENERATED.sub("", secret[:SIZE_MAX], count=1)
    text = COMMON_WORDS.sub("", text)
    counted = sum(not _is_predictable(text, place) for place in range(len(text)))
    return counted * math.log2(_alphabet(text)) if text else 0.0


def _is_predictable(text: str, place: int) -> bool:
    """Say whether a character continues a run, or ends three that occurred before."""
    if place < 2:
        return False
    three = text[place - 2 : place + 1]
    step = ord(three[1]) - ord(three[0])
    continues = step in (-1, 0, 1) and ord(three[2]) - ord(three[1]) == step
    return continues or text.find(three) < place - 2


def _alphabet(text: str) -> int:
    """Return how many characters a guesser has to try at each place.

    Letters and digits count by their class, as random text uses all of a class; of
    other characters, those that occur.
    """
    others = {each for each in text if not (each.isascii() and each.isalnum())}
    plain = set(text) - others
    for digits in ("0123456789abcdef", "0123456789ABCDEF"):
        if plain <= set(digits) and not plain <= set(string.digits):
            return len(digits) + len(others)
    classes = (string.digits, string.ascii_lowercase, string.ascii_uppercase)
    return sum(len(each) for each in classes if plain & set(each)) + len(others)
