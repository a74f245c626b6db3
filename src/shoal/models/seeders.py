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
            peer.send(other)
            receiver.send(seeder)

    def remove(self, name: str) -> None:
        """Forget a peer that left."""
        self._seeders.pop(name, None)
