"""Our end of a relay, and the peers behind it."""
