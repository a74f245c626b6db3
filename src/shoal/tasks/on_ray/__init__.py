"""Calls of functions in a Ray cluster.

``caller`` is the worker's end, and imports nothing of Ray.  It starts ``driver``, a
process that is connected to the cluster, since such a process exits when the cluster
does; ``executor`` runs in it.  ``remote`` is what runs in the cluster, with a mailbox
by which calls ask for what they lack.
"""
