"""Commands about this program and its files on this machine."""
