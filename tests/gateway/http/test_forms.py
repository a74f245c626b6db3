"""Forms with a file: whose errors are the client's, and whose are not."""

import pytest
from aiohttp import FormData, web
from aiohttp.test_utils import TestClient, TestServer

from shoal.gateway.http.forms import receive_form


class BrokenWriter:
    """Raises an error that is no fault of the client."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def write(self, data: bytes) -> None:
        raise self._error


@pytest.mark.parametrize("error", [ValueError(), AssertionError(), RuntimeError()])
async def test_errors_of_the_writer_are_not_the_forms(error: Exception) -> None:
    raised: list[Exception] = []

    async def receive(request: web.Request) -> web.Response:
        with pytest.raises(type(error)) as caught:
            await receive_form(request, BrokenWriter(error))
        raised.append(caught.value)
        return web.Response()

    app = web.Application()
    app.router.add_post("/", receive)
    form = FormData()
    form.add_field("file", b"\0", filename="a.wav")
    async with TestClient(TestServer(app)) as client:
        response = await client.post("/", data=form)

    assert (response.status, raised) == (200, [error])
