"""Which of the peers that fetch a model hear of each other."""

from shoal.domain.model_messages import ModelMessage, SeederAt
from shoal.models.chunk_senders import Receiver
from shoal.models.seeders import Seeders

ROOT = b"root"


async def _writable() -> None:
    pass


def peer(name: str, received: list[ModelMessage]) -> Receiver:
    def send(message: ModelMessage) -> bool:
        received.append(message)
        return True

    return Receiver(name, send, _writable)


def test_peer_that_sends_nothing_hears_of_others_that_do() -> None:
    seeders = Seeders()
    to_one, to_two, to_quiet = (list[ModelMessage]() for _ in range(3))
    one, two = (SeederAt(ROOT, f"http://{each}", "code") for each in ("one", "two"))

    seeders.add(peer("one", to_one), one)
    seeders.add(peer("quiet", to_quiet), SeederAt(ROOT, "", ""))
    seeders.add(peer("two", to_two), two)

    assert to_quiet == [one, two]
    assert to_one == [two]
    assert to_two == [one]


def test_chunks_of_a_peer_that_sends_nothing_are_not_elsewhere() -> None:
    seeders = Seeders()
    seeders.add(peer("quiet", []), SeederAt(ROOT, "", ""))
    seeders.add(peer("one", []), SeederAt(ROOT, "http://one", "code"))

    assert seeders.elsewhere("quiet", ROOT, [1]) == set()
    assert seeders.elsewhere("one", ROOT, [1, 2]) == set()
    assert seeders.elsewhere("quiet", ROOT, [1, 2]) == {1, 2}
