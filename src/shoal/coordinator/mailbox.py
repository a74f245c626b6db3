"""The inputs that wait for the hub's next batch."""

from collections import Counter
from collections.abc import Callable, Sequence

from shoal.coordinator.receipt_verifier import HubMail, PresentedReceipt
from shoal.domain.ids import JobId, WorkerId
from shoal.pool import inputs

HELD_MAX = 100_000  # inputs that wait while the store fails
HELD_PER_WORKER_MAX = 4096  # of them of one worker: more than its leases can cause


class Mailbox:
    """Inputs in order.

    Normally unbounded, because every source is bounded by the batches that it waits
    for.  While the store fails there are no batches: then inputs are ``held``, repeated
    ones are dropped, and workers that send too many ``have_no_room``.
    """

    def __init__(self) -> None:
        self._mail: list[HubMail] = []
        self._held = False
        self._by_worker: Counter[WorkerId] = Counter()
        self._ends: set[tuple[type, JobId]] = set()
        self._loads: dict[WorkerId, int] = {}  # the place of the last report

    def __len__(self) -> int:
        return len(self._mail)

    def post(self, mail: HubMail) -> bool:
        """Add an input; return whether it is the first."""
        if self._held and not self._is_new(mail):
            return False
        self._mail.append(mail)
        return len(self._mail) == 1

    def take(self) -> list[HubMail]:
        """Return all inputs, and empty the mailbox."""
        taken, self._mail = self._mail, []
        self._forget()
        return taken

    def put_back(self, mail: Sequence[HubMail]) -> None:
        """Put inputs that were taken before the others."""
        self._mail[:0] = mail
        self._loads = {each: at + len(mail) for each, at in self._loads.items()}

    def withdraw(self, unwanted: Callable[[HubMail], bool]) -> list[HubMail]:
        """Remove some inputs, and return them.  Not while they are held."""
        assert not self._held, "places would change"
        withdrawn = [each for each in self._mail if unwanted(each)]
        self._mail = [each for each in self._mail if not unwanted(each)]
        return withdrawn

    def hold(self) -> None:
        """Limit what is posted from now on, until ``release``."""
        self._held = True

    def release(self) -> None:
        """Lift the limits."""
        self._held = False
        self._forget()

    def has_room(self, worker_id: WorkerId | None) -> bool:
        """Say whether a worker may send more; None: whether another may join."""
        if not self._held:
            return True
        if worker_id is not None and self._by_worker[worker_id] >= HELD_PER_WORKER_MAX:
            return False
        return len(self._mail) < HELD_MAX

    def _forget(self) -> None:
        self._by_worker.clear()
        self._ends.clear()
        self._loads.clear()

    def _is_new(self, mail: HubMail) -> bool:
        """Say whether a held input changes anything, beside those before it."""
        match mail:
            case (
                inputs.Cancellation() | inputs.LimitReached() | inputs.AnswerRejected()
            ):
                if (key := (type(mail), mail.job_id)) in self._ends:
                    return False
                self._ends.add(key)
            case inputs.LeaseResult() | PresentedReceipt() | inputs.DrainAnnounced():
                self._by_worker[mail.worker_id] += 1
            case inputs.WorkerConnected(worker_id=worker_id):
                self._by_worker[worker_id] += 1
                self._loads.pop(worker_id, None)
            case inputs.LoadReported(worker_id=worker_id):
                place = self._loads.setdefault(worker_id, len(self._mail))
                if place < len(self._mail):
                    self._mail[place] = mail  # the last report counts
                    return False
            case _:
                pass  # one for each lease, or connection
        return True
