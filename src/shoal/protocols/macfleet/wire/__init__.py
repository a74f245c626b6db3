"""Bytes of the wire: what is written and read, without deciding anything."""
