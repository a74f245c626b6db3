"""The relay server: registration, discovery, and forwarding between nodes."""
