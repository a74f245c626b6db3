"""Through a front, and not to the process of the hub."""

from gateway.http.test_quotas import *  # noqa: F403
