"""Through a front, and not to the process of the hub."""

from gateway.chat.openai.test_endpoints import *  # noqa: F403
