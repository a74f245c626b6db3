"""Through a front, and not to the process of the hub."""

from gateway.chat.openai.test_takeover import *  # noqa: F403
