"""The shell: the hub, the driver and the clock; what awaits, and nothing that decides."""
