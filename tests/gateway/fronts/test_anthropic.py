"""Through a front, and not to the process of the hub."""

from gateway.chat.anthropic.test_endpoints import *  # noqa: F403
