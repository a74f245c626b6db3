"""The peers that fetch a model at present, and where each sends what it has of it."""

from dataclasses import dataclass, field

from shoal.domain.model_messages import SeederAt
from shoal.models.chunk_senders import Receiver

NAMED_MAX = 30  # peers that one hears of for a model
URL_MAX = 256  # characters, also of a passcode


@dataclass(slots=True)
class Seeders:
    """Tells the peers that fetch one model of each other."""

    _seeders: dict[str, tuple[Receiver, SeederAt]] = field(default_factory=dict)
    # The peer that got each chunk first, by the model's address.
    _first: dict[bytes, dict[int, str]] = field(default_factory=dict)
    _deferred: dict[str, set[int]] = field(default_factory=dict)  # by peer

    def add(self, peer: Receiver, seeder: SeederAt) -> None:
        """Tell a peer of others, and others of it; ignore what is too long."""
        if max(map(len, (seeder.url, seeder.passcode, seeder.root))) > URL_MAX:
            return
        if self._seeders.get(peer.name, (peer, None))[1] == seeder:
            return  # a peer that repeats itself costs nothing
        others = [
            each
            for name, each in self._seeders.items()
            if each[1].root == seeder.root and name != peer.name
        ]
        self._seeders[peer.name] = (peer, seeder)
        for receiver, other in others[-NAMED_MAX:]:
            if other.url:
                peer.send(other)
            if seeder.url:
                receiver.send(seeder)

    def elsewhere(self, name: str, root: bytes, chunks: list[int]) -> set[int]:
        """Return those of the requested chunks that the peer can get from others.

        So a chunk is sent once while there are others to send, however many want it.
        """
        if name not in self._seeders:
            return set()
        serves = bool(self._seeders[name][1].url)
        first = self._first.setdefault(root, {})
        deferred = self._deferred.setdefault(name, set())
        found = set()
        for chunk in chunks:
            holder = first.get(chunk, name)
            if holder == name or holder not in self._seeders:
                if serves:
                    first[chunk] = name
            elif chunk not in deferred:
                deferred.add(chunk)
                found.add(chunk)
        return found

    def remove(self, name: str) -> None:
        """Forget a peer that left."""
        self._deferred.pop(name, None)
        if self._seeders.pop(name, None) is not None:
            left = {seeder.root for _, seeder in self._seeders.values()}
            for root in self._first.keys() - left:
                del self._first[root]
