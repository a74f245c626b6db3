"""The numbers of commits: each counts once, and those of earlier epochs never.

A commit moves its writer's row on by one, in its own transaction.  Any other row says
what has happened: the commit was made before, another coordinator has taken over, or
the database is an older copy.
"""

from typing import get_args

from shoal.domain.errors import Fenced, WentBack
from shoal.store.port import CommitId, Epoch, Writer
from shoal.store.sql.database import Sql


def take_over(sql: Sql) -> Epoch:
    """Begin an epoch, in which no writer has made a commit."""
    query = """UPDATE writers SET epoch = epoch + 1, number = 0 WHERE name = ?
               RETURNING epoch"""
    for writer in get_args(Writer):
        ((epoch,),) = sql.execute(query, (writer,)).fetchall()
    return Epoch(epoch)  # the same of all writers


def begin_commit(sql: Sql, commit: CommitId) -> bool:
    """Count a commit in the open transaction; return False if it was made before.

    Raises Fenced or WentBack, as ``Store.append`` does.
    """
    epoch, writer, number = commit
    query = """UPDATE writers SET number = number + 1
               WHERE name = ? AND epoch = ? AND number = ?"""
    if sql.execute(query, (writer, epoch, number - 1)).rowcount:
        return True
    query = "SELECT epoch, number FROM writers WHERE name = ?"
    ((present, last),) = sql.execute(query, (writer,))
    if present != epoch:
        raise Fenced(
            f"another coordinator has taken over the database (epoch {present}; here "
            f"{epoch}): this one stops; run only one on a data folder"
        )
    if last < number:
        raise WentBack(
            f"the database went back to commit {last} of the {writer}, before commit "
            f"{number}: it is an older copy"
        )
    return False
