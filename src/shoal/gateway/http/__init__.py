"""Shared parts of endpoints: authorization, limits, bodies, responses and errors."""
