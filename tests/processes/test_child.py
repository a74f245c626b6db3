import os
import threading

import pytest

from shoal.processes.programs import describe_exit, write_all


@pytest.mark.parametrize(
    ("code", "description"),
    [
        (None, "ended"),
        (0, "ended with status 0"),
        (3, "ended with status 3"),
        (-6, "was ended by SIGABRT"),
        (-250, "was ended by signal 250"),
    ],
)
def test_describes_exit_codes(code: int | None, description: str) -> None:
    assert describe_exit(code) == description


def test_writes_more_than_a_pipe_holds() -> None:
    data = bytes(range(256)) * 4096
    reader, writer = os.pipe()

    def write() -> None:
        write_all(writer, data)
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    with open(reader, "rb") as stream:
        received = stream.read()
    thread.join()

    assert received == data


def test_closed_pipe_is_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with pytest.raises(OSError, match="pipe"):
        write_all(writer, b"x")

    os.close(writer)
