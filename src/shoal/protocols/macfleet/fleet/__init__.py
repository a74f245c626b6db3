"""Who is in the fleet: heartbeats, gossip, and what keeps strangers slow."""
