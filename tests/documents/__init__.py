"""Peers of the four protocol documents, for tests.

Each was written from the text of its document alone: what the document leaves out,
a peer leaves out as well or ignores, and what real programs do otherwise, it does not
know.  They use a WebSocket client and MessagePack, and no part of Shoal.
"""
