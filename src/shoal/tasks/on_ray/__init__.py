"""Calls of functions in a Ray cluster: whom the worker talks to, and what runs there.

``caller`` is the worker's end, and imports nothing of Ray.  It starts ``driver``, a
process that is connected to the cluster, since a process that is ends when the cluster
does.  ``remote`` is what the driver has run in the cluster, and ``desk`` is where that
asks for what it lacks.
"""
