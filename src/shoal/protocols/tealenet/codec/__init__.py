"""TealeNet's messages as bytes, between peers and with a relay: without state."""
