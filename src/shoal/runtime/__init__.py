"""The shell: hub, driver and clock; what awaits, and nothing that decides."""
