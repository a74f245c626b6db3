"""Makes calls on the same terms, each with a number and a key of its own."""

import itertools
import uuid
from collections.abc import Iterator

from shoal.client.asked import Asked, Ended
from shoal.client.options import Options
from shoal.client.packing import Function, Parcel


class Numbers:
    """What the calls of one client are known by, to it and to the coordinator."""

    def __init__(self) -> None:
        self._next: Iterator[int] = itertools.count(1)
        self._client = uuid.uuid4().hex

    def number(self) -> int:
        """Return the number of another call."""
        return next(self._next)

    def key(self, number: int) -> str:
        """Return a key that no other call of any client has."""
        return f"{self._client}-{number}"


class Terms:
    """On what terms calls are made.

    The calls of one ``map`` have keys that are counted from the one that was given.
    """

    def __init__(self, options: Options, numbers: Numbers) -> None:
        self.options = options
        self._numbers = numbers
        self._written = options.written()
        self._again = options.durable or options.retry

    def asked(
        self, function: Function, parcel: Parcel, ended: Ended, index: int | None = None
    ) -> Asked:
        """Return a call; ``index`` is where it is in a ``map``."""
        number = self._numbers.number()
        options = self._written
        if parcel.needs or parcel.digests or self.options.durable:
            options = {**options}
            if parcel.needs:
                options["needs"] = parcel.needs
            if parcel.digests:
                options["blobs"] = parcel.digests
            if self.options.durable:
                options["key"] = self._key(number, index)
                if not self.options.key:
                    options["fresh"] = True
        return Asked(
            number,
            function.name,
            parcel.args,
            parcel.kwargs,
            options,
            ended,
            self._again,
            parcel.blobs,
            self.options.on_progress,
            home=function.home,
            coded=bool(function.code),
        )

    def _key(self, number: int, index: int | None) -> str:
        if not self.options.key:
            return self._numbers.key(number)
        return self.options.key if index is None else f"{self.options.key}/{index}"
