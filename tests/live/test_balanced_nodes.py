"""Nodes behind nginx and behind Caddy, with the files of the examples."""

import shutil
import ssl
import sys
from pathlib import Path

import httpx2 as httpx
import pytest

from live.programs import KEY, PATIENCE, GatedModel, eventually
from live.reverse_proxies import WRITERS, reverse_proxy
from live.test_nodes import Nodes, lose_power, nodes, server
from transports.certificates import issue

__all__ = ["nodes", "server"]  # fixtures

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Debian's proxies"
)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_balancer_leaves_out_a_node_that_is_lost(
    nodes: Nodes, slow_model: GatedModel, tmp_path: Path, kind: str
) -> None:
    assert shutil.which(kind), f"{kind} is missing: apt-get install nginx-light caddy"
    certificate = issue(tmp_path / "tls", host="localhost")
    trusted = ("--trusted-proxy", "127.0.0.1")
    pool = [nodes.first(*trusted), nodes.standby(*trusted), nodes.standby(*trusted)]
    pool[1].pool.joined("one", *slow_model.flags)
    slow_model.go_on.set()
    addresses = [each.pool.url.removeprefix("http://") for each in pool]
    context = ssl.create_default_context(cafile=str(certificate.authority))
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ping"}]}
    with (
        reverse_proxy(kind, tmp_path / kind, addresses, certificate) as url,
        httpx.Client(
            base_url=url, headers=headers, verify=context, timeout=PATIENCE
        ) as http,
    ):

        def statuses() -> set[int]:
            """Return what several requests get, to more nodes than one."""
            chats = [http.post("/v1/chat/completions", json=body) for _ in pool]
            return {each.status_code for each in chats}

        assert statuses() == {200}

        lose_power(pool[0])
        # What was on its way to the node is lost, and the balancer looks at nodes
        # only now and then.
        eventually(
            lambda: statuses() == {200} and statuses() == {200},
            "another node has the pool",
        )
