"""Settings of a node."""

import pytest

from shoal.app.node import check_node
from shoal.config import ServeConfig
from shoal.domain.errors import ConfigError

STORE = "postgresql://shoal@db.example.com/shoal"


@pytest.mark.parametrize("node", ["", "10.0.0.1:4011", "[fd00::1]:4011", "a.lan:0"])
def test_nodes_with_a_store_and_fronts_are_accepted(node: str) -> None:
    check_node(ServeConfig(node=node, store=STORE, fronts=1))


def test_no_node_needs_neither() -> None:
    check_node(ServeConfig())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ServeConfig(node="10.0.0.1:4011", fronts=1), "give --store, too"),
        (ServeConfig(node="10.0.0.1:4011", store=STORE), "give --fronts 1 or more"),
        (ServeConfig(node="10.0.0.1", store=STORE, fronts=1), "expected HOST:PORT"),
        (ServeConfig(node="a b:1", store=STORE, fronts=1), "expected HOST:PORT"),
        (ServeConfig(node="a:99999", store=STORE, fronts=1), "expected HOST:PORT"),
        (ServeConfig(node="https://a:1", store=STORE, fronts=1), "expected HOST:PORT"),
    ],
)
def test_what_cannot_be_a_node_is_refused(config: ServeConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_node(config)
