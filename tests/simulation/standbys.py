"""Machines that stand by for the coordinator of a simulation, by the rule of the lease.

Each looks at the lease as ``app/node.py`` does, and takes over when the rule lets it.
"""

import asyncio
from contextlib import suppress

from shoal.app.node import BEAT_EVERY, LOOK_EVERY
from shoal.domain.errors import StoreError
from shoal.store.lease import LeaseRow, LeaseVerdict, LeaseWatch
from simulation.node import Node
from simulation.world import World


class Standbys:
    """The lease of a world's database, and the machines that share it."""

    def __init__(self, world: World, machines: int) -> None:
        self._world = world
        self._holder = world.node
        self._beat = 0
        self._session_lost = False  # of the holder
        self._taking = False
        self.takeovers = 0
        self._tasks = [asyncio.create_task(self._stand_by()) for _ in range(machines)]
        self._keep(world.node)

    def stop(self) -> None:
        for each in self._tasks:
            each.cancel()

    def end_session(self) -> None:
        """End the session that has the lock."""
        self._session_lost = True

    async def _stand_by(self) -> None:
        """Be a machine, whose coordinator is active at times."""
        random = self._world.random
        watch = LeaseWatch()
        while True:
            await asyncio.sleep(LOOK_EVERY * random.uniform(1.0, 1.2))
            now = asyncio.get_running_loop().time()
            row: LeaseRow | None = self._row()
            if now < self._world.store.faults.away_until:
                self.end_session()
                row = None
            verdict = watch.on_look(row, now)
            if verdict is LeaseVerdict.END_HOLDER:
                self.end_session()
            elif verdict is LeaseVerdict.TAKE_OVER and not self._taking:
                await self._take_over()
                watch = LeaseWatch()

    def _row(self) -> LeaseRow:
        held = self._taking or (self._holder.up and not self._session_lost)
        return LeaseRow(held, f"{id(self._holder)}", self._beat, "10.0.0.1:4011")

    async def _take_over(self) -> None:
        self._taking = True  # it has the lock
        try:
            with suppress(StoreError):
                await self._world.start()
                self._holder, self._session_lost = self._world.node, False
                self._beat += 1
                self._keep(self._holder)
                self.takeovers += 1
        finally:
            self._taking = False

    def _keep(self, node: Node) -> None:
        node.running.append(node.process.start(self._beat_for(node)))

    async def _beat_for(self, node: Node) -> None:
        """Show that the holder runs, and lock again where its session was lost."""
        while True:
            await asyncio.sleep(BEAT_EVERY)
            if self._holder is not node or self._taking:
                return  # its next commit or look is fenced
            with suppress(StoreError):
                node.store.check_connected()
                self._beat += 1
                self._session_lost = False
