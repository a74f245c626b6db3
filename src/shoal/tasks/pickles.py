"""Pickles of what a worker that trusts code gets, and of what it returns."""

import io

import cloudpickle
import msgspec

from shoal.tasks.class_instances import rebuild_struct


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc] # it has no types
    def reducer_override(self, value: object) -> object:
        # Its own reduction would run __post_init__ once more.
        if isinstance(value, msgspec.Struct):
            return rebuild_struct, (type(value), msgspec.structs.asdict(value))
        return super().reducer_override(value)


def dump_pickle(value: object) -> bytes:
    """Pickle a value.  Raises whatever its parts raise."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
