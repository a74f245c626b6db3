"""Settings of a node."""

import pytest

from shoal.app.node import check_node
from shoal.config import ServeConfig
from shoal.domain.errors import ConfigError

STORE = "postgresql://shoal@db.example.com/shoal"


@pytest.mark.parametrize("node", ["", "10.0.0.1:4011", "[fd00::1]:4011", "a.lan:0"])
def test_nodes_with_a_store_and_fronts_are_accepted(node: str) -> None:
    check_node(ServeConfig(node=node, host="0.0.0.0", store=STORE, fronts=1))


@pytest.mark.parametrize("node", ["127.0.0.1:4011", "[::1]:0", "localhost:4011"])
def test_nodes_of_one_machine_may_listen_for_it_alone(node: str) -> None:
    check_node(ServeConfig(node=node, store=STORE, fronts=1))


@pytest.mark.parametrize("node", ["10.0.0.1:4011", "[fd00::1]:4011", "a.lan:4011"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_an_address_at_which_nothing_listens_is_refused(node: str, host: str) -> None:
    config = ServeConfig(node=node, host=host, store=STORE, fronts=1)

    with pytest.raises(ConfigError, match="give --host") as caught:
        check_node(config)

    assert f"--host {host}" in str(caught.value)


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
        (ServeConfig(node="0.0.0.0:1", store=STORE, fronts=1), "own address"),
        (ServeConfig(node="[::]:1", store=STORE, fronts=1), "own address"),
    ],
)
def test_what_cannot_be_a_node_is_refused(config: ServeConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_node(config)
