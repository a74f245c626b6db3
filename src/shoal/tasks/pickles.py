"""Pickles of what a worker that trusts code gets, and of what it returns."""

import io
from collections.abc import Callable
from typing import Any

import cloudpickle
import msgspec

from shoal.tasks.class_instances import rebuild_struct


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
    def reducer_override(self, value: object) -> object:
        # Its own reduction would run __post_init__ once more.
        if isinstance(value, msgspec.Struct):
            return rebuild_struct, (type(value), msgspec.structs.asdict(value))
        return super().reducer_override(value)


def dump_pickle(value: object, stays: Callable[[Any], bool] | None = None) -> bytes:
    """Pickle a value, and those of its ``PickleBuffer`` of which ``stays`` is true.

    Raises whatever its parts raise.
    """
    file = io.BytesIO()
    _Pickler(file, buffer_callback=stays).dump(value)
    return file.getvalue()
