import pytest

from ledger.builders import AT, COORDINATOR, KEY, Log, claims, unsigned
from shoal.ledger import checkpoint, keys, merkle, receipts
from shoal.ledger.merkle import EMPTY_ROOT, Frontier
from shoal.ledger.notary import Notary


def notary() -> Notary:
    return Notary(COORDINATOR, Frontier(), 0, EMPTY_ROOT)


def test_every_receipt_of_a_batch_is_signed_and_logged() -> None:
    sealed = notary().seal([claims(), unsigned(), unsigned("job-3")], AT)

    assert [each.job_id for each in sealed.receipts] == ["job-1", "job-2", "job-3"]
    assert [each.index for each in sealed.receipts] == [0, 1, 2]
    for each in sealed.receipts:
        assert keys.verify(KEY, each.signature, b"shoal receipt v1\n" + each.body)
    leaves = [merkle.leaf_hash(each.body) for each in sealed.receipts]
    assert [hash for level, _, hash in sealed.nodes if level == 0] == leaves


def test_batch_has_one_checkpoint() -> None:
    sealed = notary().seal([claims(), unsigned()], AT)

    found = checkpoint.verify(sealed.note, KEY)

    assert found == sealed.checkpoint
    assert (found.size, found.at) == (2, AT)
    assert found.root == sealed.frontier.root()


def test_receipts_name_the_checkpoint_before_their_batch() -> None:
    log = Log()
    first = log.add(claims(), unsigned())
    second = log.add(unsigned("job-3"), unsigned("job-4"))

    named = [receipts.read(each.body) for each in log.receipts]

    assert [(each.checkpoint_size, each.checkpoint_root) for each in named] == [
        (0, EMPTY_ROOT),
        (0, EMPTY_ROOT),
        (2, first.checkpoint.root),
        (2, first.checkpoint.root),
    ]
    assert second.checkpoint.size == 4


def test_unstored_batch_has_no_effect() -> None:
    log = Log()
    log.add(claims())
    lost = log.notary.seal([unsigned("lost")], AT)

    again = log.add(unsigned("kept"))

    assert lost.receipts[0].index == again.receipts[0].index == 1
    assert again.checkpoint.size == 2
    assert lost.checkpoint.root != again.checkpoint.root


def test_sealing_is_deterministic() -> None:
    assert notary().seal([claims()], AT).note == notary().seal([claims()], AT).note


def test_batch_is_committed_once_and_in_order() -> None:
    one = notary()
    sealed = one.seal([claims()], AT)
    one.commit(sealed)

    with pytest.raises(AssertionError, match="sealed after 0, expected 1"):
        one.commit(sealed)


def test_notary_continues_after_a_restart() -> None:
    whole, log = Log(), Log()
    for number in range(9):
        whole.add(unsigned(f"job-{number}"))
        sealed = log.add(unsigned(f"job-{number}"))
        size = sealed.checkpoint.size
        hashes = [log.nodes[place] for place in merkle.frontier_positions(size)]
        head = checkpoint.verify(sealed.note, KEY)
        frontier = Frontier(size, hashes)
        log.notary = Notary(COORDINATOR, frontier, head.size, head.root)

    assert log.notes == whole.notes


@pytest.mark.parametrize(("size", "root"), [(1, EMPTY_ROOT), (0, bytes(32))])
def test_log_that_differs_from_its_checkpoint_is_rejected(
    size: int, root: bytes
) -> None:
    with pytest.raises(ValueError, match="not the one of the last checkpoint"):
        Notary(COORDINATOR, Frontier(), size, root)
