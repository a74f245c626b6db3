"""Jobs for the models that a peer offers, in whatever order two pools meet."""

from dataclasses import dataclass, replace

import pytest

from protocols.tealenet.network import (
    HOST,
    Network,
    ShoalNode,
    local_coordinator,
)
from protocols.tealenet.relay_client.relay_nodes import CHAT, NODE_A, A
from shoal.domain.ids import JobId, LeaseNumber
from shoal.domain.vocabulary import OffersChanged, Rejected, RunJob
from shoal.domain.worker import CHAT_ONLY, Offer
from shoal.ledger.keys import Signer
from shoal.protocols.seam.peer_session import PeerJoined, PeerLeft
from shoal.protocols.tealenet.local_node import Config, TealeLocalNode
from shoal.protocols.tealenet.peer import WAN
from shoal.protocols.tealenet.relay_client.node import DISCOVER_INTERVAL

STEP = 0.1  # seconds between two jobs
JOBS_MAX = 200  # of one pool: the other one admits 256 at a time


def pool_with_a_model(signer: Signer) -> TealeLocalNode:
    """Return a pool with slots to spare."""
    offer = Offer(CHAT_ONLY, frozenset({"m1"}), slots=2 * JOBS_MAX)
    local = local_coordinator(Config(open=True), signer=signer)
    return replace(local, offers=(offer,))


@dataclass
class Submitter:
    """A pool that submits a job whenever the other one offers it a model."""

    end: ShoalNode
    other: ShoalNode
    sent: int = 0
    seen: int = 0  # messages that were read
    offered: bool = False

    def submit(self, net: Network) -> None:
        for each in self.end.received[self.seen :]:
            assert not isinstance(each.message, PeerLeft | Rejected)
            if isinstance(each.message, OffersChanged):
                self.offered = bool(each.message.offers)
        self.seen = len(self.end.received)
        if self.offered:
            self.sent += 1
            job = RunJob(JobId(f"{self.sent}"), LeaseNumber(1), CHAT)
            net.send(self.end, self.other.node.id, job)

    @property
    def arrived(self) -> int:
        return len(self.other.messages(RunJob))


@pytest.mark.parametrize("tenths", range(0, 120, 7))
@pytest.mark.parametrize("first", [HOST, NODE_A])
def test_every_job_reaches_the_pool_that_offers_the_model(
    first: Signer, tenths: int
) -> None:
    """The second pool comes at any time between two looks of the first one."""
    net = Network()
    one = net.attach(pool_with_a_model(first))
    net.run(tenths / 10)
    two = net.attach(pool_with_a_model(NODE_A if first is HOST else HOST))
    submitters = Submitter(one, two), Submitter(two, one)

    for _ in range(JOBS_MAX):
        net.run(STEP)
        for each in submitters:
            each.submit(net)

    for each in submitters:
        assert each.sent > 0
        assert each.arrived == each.sent


def test_a_pool_that_dialled_before_it_was_known_is_missed_when_it_is_silent() -> None:
    net = Network()
    host = net.attach(pool_with_a_model(HOST))
    other = net.attach(pool_with_a_model(NODE_A))
    net.run(DISCOVER_INTERVAL)
    assert host.messages(PeerJoined, A)

    net.mute(other)
    net.run(WAN.disconnected_after + 1)

    assert host.messages(PeerLeft, A)
