"""Sharing the files of models with peers: what is served, and what is fetched."""
