"""The exceptions of calls."""

import pickle

from shoal.client.errors import TaskTimeout


def test_timeout_is_a_builtin_timeout_error() -> None:
    assert issubclass(TaskTimeout, TimeoutError)


def test_error_can_be_pickled() -> None:
    copy = pickle.loads(pickle.dumps(TaskTimeout("slow", "trace", "job1")))

    assert type(copy) is TaskTimeout
    assert (str(copy), copy.traceback, copy.job_id) == ("slow", "trace", "job1")
