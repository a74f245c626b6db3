"""The order of what a member reports from several threads."""

import threading

from shoal.training.launch.member_reports import MemberReports
from shoal.training.run_events import Message


class SlowLink:
    """A link on which the first message takes until ``go_on``; ``sent`` has all."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def send(self, message: Message) -> bool:
        if not self.begun.is_set():
            self.begun.set()
            self.go_on.wait()
        self.sent.append(message)
        return True

    def receive(self, timeout: float | None = None) -> Message | None:
        threading.Event().wait(timeout)
        return None


def test_no_end_overtakes_what_was_reported_before_it() -> None:
    link, reports = SlowLink(), MemberReports(0)
    reports.start(link)
    reports.hash(0, 2, "0" * 64)
    assert link.begun.wait(60)  # the thread that flushes has taken it

    ending = threading.Thread(target=reports.event, args=("ended", 0))
    ending.start()
    ending.join(0.1)
    link.go_on.set()
    ending.join()
    reports.close()

    assert [each["event"] for each in link.sent] == ["progress", "ended"]
