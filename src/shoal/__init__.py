"""Shoal joins the computers you already have into one pool for AI work.

This package is its Python client: it calls functions on the machines of a pool.

    import shoal

    @shoal.task
    def square(x: float) -> float:
        return x * x

    with shoal.Pool() as pool:
        print(pool.submit(square, 3).result())
        print(list(pool.map(square, range(1000))))

``Pool`` is for programs that block, ``AsyncPool`` for coroutines, ``register_joblib``
for joblib and scikit-learn, and ``train`` for models of PyTorch.  A worker runs the
tasks of the modules that it was started with (``shoal join --tasks MODULE``), and other
functions with ``--trust-code``.

``launch`` starts a script on several machines at once, as torchrun does, and ``report``
shows its numbers to those who watch it.
"""

# Each name is imported when it is first used, so that commands start at once.  Type
# checkers read __init__.pyi.

import importlib

__version__ = "0.2.0"

_PLACES = {
    "AsyncPool": "shoal.client.async_pool",
    "CodeRefused": "shoal.client.errors",
    "ConnectionLost": "shoal.client.errors",
    "PlainValuesOnly": "shoal.client.errors",
    "Pool": "shoal.client.pool",
    "Ref": "shoal.tasks.values",
    "RemoteTraceback": "shoal.client.errors",
    "ShoalError": "shoal.domain.errors",
    "TaskError": "shoal.client.errors",
    "TaskTimeout": "shoal.client.errors",
    "UnknownTask": "shoal.domain.errors",
    "WorkerLost": "shoal.domain.errors",
    "current_pool": "shoal.client.ambient_pool",
    "is_writer": "shoal.training.meeting",
    "launch": "shoal.client.training_run",
    "progress": "shoal.tasks.running_call",
    "register_joblib": "shoal.client.joblib_backend",
    "report": "shoal.training.launch.script_lines",
    "task": "shoal.tasks.registry",
    "train": "shoal.training.loop.train",
}


__all__ = ["__version__", *_PLACES]


def __getattr__(name: str) -> object:
    if (place := _PLACES.get(name)) is None:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(place), name)
    return found
