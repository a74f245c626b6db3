"""What a chat promises in every dialect, over a front."""

import pytest

from gateway.chat.test_alike import (
    test_an_answered_request_is_freed_at_once,  # noqa: F401
)

pytestmark = pytest.mark.shared_pool
