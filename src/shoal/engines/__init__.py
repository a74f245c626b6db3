"""Engines: what runs models on a worker, embedded or on a model server."""
