"""Training across machines: collectives among ranks, and what runs on them."""
