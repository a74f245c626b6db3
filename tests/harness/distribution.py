"""Which process of the suite runs which tests: each file in one of them.

As pytest-xdist's ``--dist loadfile``, but for what happens when a process ends in the
middle of a test: that test has failed, and is not run again.  pytest-xdist gives it to
the next process, until four of them have ended, and with it files that are done, whose
end is never announced to the process that waits.  It also gives the next process one
file alone; with a single test left in it, that process waits for ever, because a test
begins only once the one after it is known.
"""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class EachOnce(LoadFileScheduling):  # type: ignore[misc] # it has no types
    """Assigns files to processes."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that a crashed process was running."""
        work = self.assigned_work[node]
        left = (test for tests in work.values() for test in tests if not tests[test])
        began = next(left, None)
        for file, tests in list(work.items()):
            if began in tests:
                tests[began] = True
            if all(tests.values()):
                del work[file]
        super().remove_node(node)  # gives the rest to others
        return began

    def schedule(self) -> None:
        """Give every process that runs out of tests another file, and then one more."""
        super().schedule()
        if self.collection:
            super().schedule()
