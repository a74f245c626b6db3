"""What every store promises about browsers that are signed in, and sign-in codes."""

from shoal.domain.credentials import BrowserSession, digest_of
from shoal.store.port import SignInCode, Store

KEY = digest_of("key")
NOW = 1_700_000_000.0  # Unix time


def session(name: str, expires_at: float = NOW) -> BrowserSession:
    return BrowserSession(digest_of(name), KEY, expires_at)


def code(name: str, expires_at: float = NOW) -> SignInCode:
    return SignInCode(digest_of(name), KEY, expires_at)


async def test_sessions_stay_in_their_order_until_they_are_deleted(
    store: Store,
) -> None:
    opened = [session(str(number)) for number in range(5)]
    await store.sign_ins.write_sessions({each.digest: each for each in opened[:4]})
    await store.sign_ins.write_sessions({each.digest: each for each in opened})

    assert await store.sign_ins.sessions() == opened

    gone = digest_of("none")
    await store.sign_ins.write_sessions({opened[1].digest: None, gone: None})
    await store.sign_ins.write_sessions({})

    assert await store.sign_ins.sessions() == [opened[0], *opened[2:]]


async def test_a_code_is_redeemed_once(store: Store) -> None:
    await store.sign_ins.add_code(code("a"), 9)

    assert await store.sign_ins.redeem(digest_of("b")) is None
    assert await store.sign_ins.redeem(digest_of("a")) == code("a")
    assert await store.sign_ins.redeem(digest_of("a")) is None


async def test_the_newest_codes_stay(store: Store) -> None:
    for name in ("a", "b", "c", "d"):
        await store.sign_ins.add_code(code(name), 3)

    assert await store.sign_ins.redeem(digest_of("a")) is None
    for name in ("d", "b", "c"):
        assert await store.sign_ins.redeem(digest_of(name)) == code(name)


async def test_pruning_deletes_what_has_expired(store: Store) -> None:
    kept, expired = session("kept"), session("expired", NOW - 2)
    await store.sign_ins.write_sessions({each.digest: each for each in (kept, expired)})
    for each in (code("kept"), code("expired", NOW - 2)):
        await store.sign_ins.add_code(each, 9)

    await store.prune(NOW - 1)

    assert await store.sign_ins.sessions() == [kept]
    assert await store.sign_ins.redeem(digest_of("expired")) is None
    assert await store.sign_ins.redeem(digest_of("kept")) == code("kept")
