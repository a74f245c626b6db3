"""Calls of functions in a Ray cluster.

``caller`` is the worker's end, and does not import Ray.  It starts ``driver``, which
connects to the cluster in a process of its own, because such a process exits when the
cluster does; ``executor`` runs in it.  ``remote`` runs in the cluster, with a mailbox
in which calls request missing blobs.
"""
