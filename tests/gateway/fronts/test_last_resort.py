"""Through a front, and not to the process of the hub."""

from gateway.test_last_resort import *  # noqa: F403
