"""Through a front, and not to the process of the hub."""

from gateway.chat.test_beginnings import *  # noqa: F403
