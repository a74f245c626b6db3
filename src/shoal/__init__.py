"""Shoal turns the machines you have into one AI computer.

What Python programs use of it is loaded when it is first named, so that commands begin
at once; type checkers read ``__init__.pyi``.
"""

import importlib

__version__ = "0.1.0"

_PLACES = {
    "AsyncPool": "shoal.client.async_pool",
    "CodeRefused": "shoal.client.failures",
    "ConnectionLost": "shoal.client.failures",
    "PlainValuesOnly": "shoal.client.failures",
    "Pool": "shoal.client.pool",
    "Ref": "shoal.tasks.values",
    "RemoteTraceback": "shoal.client.failures",
    "ShoalError": "shoal.domain.errors",
    "TaskError": "shoal.client.failures",
    "TaskTimeout": "shoal.client.failures",
    "UnknownTask": "shoal.domain.errors",
    "WorkerLost": "shoal.domain.errors",
    "progress": "shoal.tasks.progress",
    "register_joblib": "shoal.client.joblib_backend",
    "task": "shoal.tasks.registry",
}


__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> object:
    if (place := _PLACES.get(name)) is None:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(place), name)
    return found
