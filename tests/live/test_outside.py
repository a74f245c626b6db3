"""Shoal sends nothing to anyone outside the pool that nobody ordered (docs/data.md)."""

import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest

import shoal
from live.machines import Machine, two_machines
from live.programs import KEY, PATIENCE, TESTS, TINY, eventually
from live.sites import Site
from models.tiny_answers import ANSWERS
from tasks.demo_tasks import add

ETH_P_ALL, ETH_P_IP, ETH_P_ARP, ETH_P_IPV6 = 3, 0x0800, 0x0806, 0x86DD  # if_ether.h
SO_RCVBUFFORCE = 33  # asm-generic/socket.h
SOL_PACKET, PACKET_STATISTICS = 263, 6  # linux/if_packet.h
TCP, UDP = 6, 17
DNS, MDNS = 53, 5353
BUFFER = 256 << 20  # bytes: all that passes in a test


class Recorder:
    """The frames of all interfaces of a machine."""

    def __init__(self, machine: Machine) -> None:
        with machine.inside():
            self._socket = socket.socket(
                socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL)
            )
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
        self._socket.setblocking(False)
        self._own = machine.address

    def close(self) -> None:
        self._socket.close()

    def sent_outside(self) -> set[str]:
        """Return what was sent since the last call, but for mDNS and loopback.

        Questions for addresses count as sent outside wherever they go, as a resolver on
        this machine forwards them; so does ARP, which looks for a way to an address.
        """
        found = {where for frame in self._frames() for where in self._outside(*frame)}
        lost = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
        assert struct.unpack("II", lost)[1] == 0
        return found

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        while True:
            try:
                data, (_, protocol, kind, *_) = self._socket.recvfrom(1 << 17)
            except BlockingIOError:
                return
            if kind == socket.PACKET_OUTGOING:
                yield protocol, data

    def _outside(self, protocol: int, data: bytes) -> Iterator[str]:
        if protocol == ETH_P_ARP:
            yield f"ARP for {socket.inet_ntop(socket.AF_INET, data[24:28])}"
            return
        if protocol == ETH_P_IP:
            size, carried = (data[0] & 15) * 4, data[9]
            to = socket.inet_ntop(socket.AF_INET, data[16:20])
            inside = to.startswith("127.") or to == self._own
        else:
            assert protocol == ETH_P_IPV6, protocol
            size, carried = 40, data[6]
            to = socket.inet_ntop(socket.AF_INET6, data[24:40])
            inside = to == "::1"
        if carried not in (TCP, UDP):
            return  # the system's own, such as that it joins a group
        port = int.from_bytes(data[size + 2 : size + 4])
        announced = (to, port) in (("224.0.0.251", MDNS), ("ff02::fb", MDNS))
        if port == DNS or not (inside or announced):
            yield f"{to}:{port}"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A machine with a way to everywhere, on which nobody answers."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=":")
    with two_machines() as (machine, router):
        machine.ip("route", "add", "default", "via", router.address)
        site = Site(machine, tmp_path)
        try:
            yield site
        finally:
            site.programs.close()


def test_nothing_is_sent_to_anyone_outside_the_pool(site: Site) -> None:
    with closing(Recorder(site.machine)) as recorder:
        pool = site.serve("--host", "0.0.0.0")
        local = f"http://127.0.0.1:{pool.port}"
        worker = site.join(
            local, "--model", f"tiny={TINY}", "--tasks", "tasks.demo_tasks"
        )
        worker.event("joined")
        with site.machine.inside():
            eventually(lambda: "tiny" in str(pool.workers()), "the model is offered")
            question, answer = next(iter(ANSWERS.items()))
            assert site.ask(pool, question, "tiny") == answer
            with shoal.Pool(local, KEY) as client:
                assert client.submit(add, 20, 22).result(PATIENCE) == 42
            with urlopen(local, timeout=PATIENCE) as page:
                assert page.status == 200
        assert worker.terminate() == 0
        assert pool.program.terminate() == 0

        assert recorder.sent_outside() == set()

        with (  # what would be seen
            site.machine.inside(),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender,
        ):
            sender.sendto(b"telemetry", ("203.0.113.7", 443))
            sender.sendto(b"name?", ("127.0.0.53", DNS))
        seen: set[str] = set()

        def are_seen() -> bool:  # once an address has been looked for
            seen.update(recorder.sent_outside())
            return {"127.0.0.53:53", "203.0.113.7:443"} <= seen

        eventually(are_seen, "both are seen")
