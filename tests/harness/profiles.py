"""How much is tried: little in ``make test``, much in ``make test-long``.

No profile has a deadline, for how long an example takes says how busy the machine is.
The short profile draws the same examples each time, so that a test that fails fails
because of a change; the long one draws new ones each time, and prints how to draw a
failing one again.
"""

from hypothesis import settings

SHORT, LONG = "short", "long"


def register() -> None:
    """Tell Hypothesis of the profiles; ``--hypothesis-profile`` chooses one."""
    settings.register_profile(SHORT, deadline=None, max_examples=25, derandomize=True)
    settings.register_profile(LONG, deadline=None, max_examples=500, print_blob=True)
    settings.load_profile(SHORT)


def examples(share: float) -> int:
    """Return this share of the profile's examples, for a test that is slow at each."""
    return max(round(settings().max_examples * share), 5)
