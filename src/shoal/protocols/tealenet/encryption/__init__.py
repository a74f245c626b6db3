"""Encryption of sessions through a relay, so that the relay cannot read them."""
