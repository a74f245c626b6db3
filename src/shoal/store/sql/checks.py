"""What any database of a store can be checked for: its accounts and its log."""

from shoal.domain.errors import StoreBroken
from shoal.ledger.merkle import EMPTY_ROOT, Frontier
from shoal.store.packing import unpack
from shoal.store.sql.database import Sql, in_steps

LAST_HEAD = "SELECT size, root, note, at FROM checkpoints ORDER BY size DESC LIMIT 1"


def book_problems(sql: Sql) -> list[str]:
    """Return why the accounts are wrong."""
    ((total,),) = sql.execute("SELECT coalesce(sum(balance), 0) FROM accounts")
    if not total:
        return []
    return [f"the accounts sum to {total} micro-dollars, expected 0"]


def log_problems(sql: Sql) -> list[str]:
    """Return why the receipts are not those of the last checkpoint.

    Makes the log anew from them: about 10 s for a million.
    """
    row = sql.execute(LAST_HEAD).fetchone()
    frontier = Frontier()
    query = "SELECT number, hash FROM tree WHERE number > ? ORDER BY number"
    nodes = in_steps(sql, query, -1)
    query = "SELECT leaf, body FROM receipts WHERE leaf > ? ORDER BY leaf"
    for leaf, packed in in_steps(sql, query, -1):
        if leaf != frontier.size:
            return [f"receipt {frontier.size} is missing"]
        try:
            made = frontier.append(unpack(packed))
        except StoreBroken as error:
            return [f"receipt {leaf}: {error}"]
        if any(next(nodes, (0, None))[1] != each for _, _, each in made):
            return [f"receipt {leaf} is not the one in the log"]
    found = frontier.size, frontier.root()
    if found != ((0, EMPTY_ROOT) if row is None else row[:2]):
        return [f"the {frontier.size} receipts are not those of the last checkpoint"]
    return []


def size_and_root_in(sql: Sql, size: int) -> tuple[int, bytes | None]:
    """Return how many receipts a database has, and the log's root at a size.

    None: there is no checkpoint of that size.
    """
    query = """SELECT (SELECT max(size) FROM checkpoints),
                      (SELECT root FROM checkpoints WHERE size = ?)"""
    head, root = sql.execute(query, (size,)).fetchone()
    return head or 0, root
