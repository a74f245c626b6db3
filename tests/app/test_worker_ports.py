import pytest

from ledger.builders import WORKER
from shoal.app.worker_ports import WorkerPorts, fleet_wires
from shoal.domain.errors import ConfigError
from shoal.domain.worker import UNKNOWN_HARDWARE


def ports(host: str, token: str) -> WorkerPorts:
    (protocol,) = fleet_wires().values()
    settings = protocol.config()
    return WorkerPorts(
        protocol, settings, host, token, "", "w", UNKNOWN_HARDWARE, WORKER
    )


async def test_fleet_with_a_weak_token_is_refused_beyond_loopback() -> None:
    with pytest.raises(ConfigError, match=r"the fleet's token: .*openssl rand"):
        ports("0.0.0.0", "a-fleet-token")

    assert ports("127.0.0.1", "a-fleet-token").token
    assert ports("0.0.0.0", "5d0e93b7a1c84f26d9e1").token
