"""How the running call reaches its coordinator, for calls of its own."""

import os

COORDINATOR_URL = "SHOAL_COORDINATOR_URL"
COORDINATOR_FINGERPRINT = "SHOAL_COORDINATOR_FINGERPRINT"
"""Variables of a worker's processes: the coordinator that it joined, and its key."""


class RunningCall:
    """The call that this process runs.

    ``grant`` is as in ``RunJob``, and ``number`` that of the call in its call stream.
    """

    __slots__ = ("grant", "number")

    def __init__(self) -> None:
        self.grant = ""
        self.number = 0


RUNNING = RunningCall()


def call_access() -> tuple[str, str] | None:
    """Return the URL of the coordinator, and the credential of the running call.

    None: the coordinator gave it none, or has no URL.
    """
    url = os.environ.get(COORDINATOR_URL)
    if not url or not RUNNING.grant:
        return None
    # Most calls make none of their own.
    from shoal.domain.credentials import call_credential, with_fingerprint

    credential = call_credential(RUNNING.grant, RUNNING.number)
    fingerprint = bytes.fromhex(os.environ.get(COORDINATOR_FINGERPRINT, ""))
    return url, with_fingerprint(credential, fingerprint or None)


def set_openai_variables() -> None:
    """Let OpenAI's clients in this process use the pool as the running call."""
    if (access := call_access()) is not None:
        url, credential = access
        os.environ |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": credential}
