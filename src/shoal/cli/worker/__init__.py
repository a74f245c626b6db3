"""What `shoal join` consists of: the coordinator to join, and reports on it."""
