"""How many jobs an engine does at a time, whichever of its models they are for."""

import asyncio


class Slots:
    """Shared by the agents of one engine, each of which offers all of them.

    ``jobs`` is how many the agents have between them, also those that wait for a slot.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = asyncio.Semaphore(size)
        self.jobs = 0

    def kept_busy(self, own: int) -> bool:
        """Say whether all are taken, and not by an agent's ``own`` jobs alone.

        Its coordinator cannot know: it counts the jobs of each model for itself.
        """
        return own < self.size <= self.jobs
