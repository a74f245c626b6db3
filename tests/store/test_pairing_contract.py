"""The contract of stores for pairing codes."""

from dataclasses import replace

from shoal.domain.facts import WorkerTrusted
from shoal.store.port import PairedWorker, PairingCode, Store

CODE = PairingCode("ABCDEF", "alice", "ada", expires_at=100.0)
KEY, OTHER = "11" * 32, "22" * 32


async def test_code_survives_storage(store: Store) -> None:
    assert await store.pairing.add(CODE)

    assert await store.pairing.find("ABCDE") == [CODE]
    assert await store.pairing.find("abcde") == []


async def test_codes_are_found_by_their_beginning(store: Store) -> None:
    like = replace(CODE, code="ABCDE9")
    for code in (
        CODE,
        like,
        replace(CODE, code="ABCD"),
        replace(CODE, code="ABCDF0"),
    ):
        assert await store.pairing.add(code)

    assert await store.pairing.find("ABCDE") == [like, CODE]
    assert await store.pairing.find("ABCDEF") == [CODE]
    assert await store.pairing.find("ABCD%") == []


async def test_code_is_unique(store: Store) -> None:
    assert await store.pairing.add(CODE)

    assert not await store.pairing.add(replace(CODE, user="bob"))
    assert await store.pairing.find("ABCDE") == [CODE]


async def test_code_is_claimed_once_before_it_expires(store: Store) -> None:
    await store.pairing.add(CODE)
    assert not await store.pairing.claim("ABCDEF", KEY, 100.0)
    assert not await store.pairing.claim("000000", KEY, 50.0)

    assert await store.pairing.claim("ABCDEF", KEY, 99.0)
    assert not await store.pairing.claim("ABCDEF", OTHER, 99.5)

    claimed = replace(CODE, public_key=KEY, claimed_at=99.0)
    assert await store.pairing.find("ABCDE") == [claimed]


async def test_unclaimed_codes_are_counted_by_owner(
    store: Store,
) -> None:
    await store.pairing.add(CODE)
    await store.pairing.add(replace(CODE, code="000001"))
    await store.pairing.add(replace(CODE, code="000002", owner="bob"))
    await store.pairing.add(replace(CODE, code="000003", expires_at=10.0))
    await store.pairing.claim("000001", KEY, 5.0)

    assert await store.pairing.count_claimable("alice", 50.0) == 1
    assert await store.pairing.count_claimable("bob", 50.0) == 1
    assert await store.pairing.count_claimable("alice", 100.0) == 0


async def test_partners_are_listed_with_the_time_of_their_first_pairing(
    store: Store,
) -> None:
    await store.append([WorkerTrusted("alice", "ada", KEY)], 10.0)
    await store.append([WorkerTrusted("alice", "ada", OTHER)], 20.0)
    await store.append([WorkerTrusted("alice", "ada", KEY)], 30.0)
    await store.append([WorkerTrusted("alice", "bob", KEY)], 40.0)

    partners = await store.pairing.paired_workers("alice", "ada")

    assert partners == [PairedWorker(KEY, 10.0), PairedWorker(OTHER, 20.0)]
    assert await store.pairing.paired_workers("bob", "ada") == []
    assert await store.pairing.count_paired("alice") == 3
    assert await store.pairing.count_paired("bob") == 0


async def test_expired_codes_are_deleted_later(
    store: Store,
) -> None:
    await store.pairing.add(CODE)

    await store.prune(100.0)
    assert await store.pairing.find("ABCDE") == [CODE]

    await store.prune(101.0)
    assert await store.pairing.find("ABCDE") == []
