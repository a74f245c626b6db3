"""Calls of functions in a Dask cluster.

``caller`` is the worker's end, which submits a Dask task for each call or call stream.
``host`` runs in the cluster: each Dask worker has processes of its own for the calls,
because a thread of Dask's cannot be stopped.
"""
