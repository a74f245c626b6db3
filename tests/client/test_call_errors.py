"""The errors of calls on the wire."""

from shoal.client.call_errors import home_module
from tasks import demo_tasks


def test_home_module_follows_the_function_or_its_name() -> None:
    assert home_module("demo.add", demo_tasks.add) == demo_tasks.__name__
    assert (
        home_module(f"{__name__}.test_home_module_follows_the_function_or_its_name")
        == __name__
    )
    assert home_module(f"{__name__}.nothing") == ""
    assert home_module("add") == ""
