"""Support for slow machines, hanging tests and leftover processes."""
