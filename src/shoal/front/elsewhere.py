"""What a front does not have, and only the hub's process does."""

from typing import NoReturn


class OnlyAtHub(Exception):
    """The request has to be answered where the hub is."""


class Elsewhere:
    """Stands for a part of the coordinator that is in the hub's process."""

    def __getattr__(self, name: str) -> NoReturn:
        raise OnlyAtHub(name)
