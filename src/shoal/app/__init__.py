"""The composition root: puts a coordinator together from its parts.

The only room that knows every concrete wire, store and server.
"""
