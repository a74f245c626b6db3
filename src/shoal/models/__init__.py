"""Model files between peers: a library that is shared, and downloads."""
