"""Training runs over HTTP: their loss, their pace and their ranks."""

from pathlib import Path

from coordinator.hubs import ScriptedWorker
from gateway.keys import make_key, request
from gateway.runs.test_endpoints import RUN, link, member, next_of, open_run
from gateway.serving import Pool, eventually, serving
from shoal.domain.facts import Fact, JobLeased, JobSubmitted
from shoal.domain.ids import LeaseNumber, WorkerId
from shoal.domain.work import JSON, JobKind
from shoal.training.run_link import EVENTS, RunLink


async def reported(pool: Pool, opened: RunLink) -> None:
    """Report two steps of rank 0, and one of rank 1."""
    for rank, step, loss in ((0, 1, 4.0), (1, 1, 4.5), (0, 2, 3.0)):
        values = {"step": step, "loss": loss}
        opened.send({"event": "progress", "rank": rank, "values": values})

    async def shown() -> bool:
        _, run = await request(pool, "GET", f"/admin/runs/{RUN}")
        return bool(run["step"] == 2)

    while not await shown():
        pass


async def test_run_is_shown_with_its_points_and_ranks(pool: Pool) -> None:
    async with open_run(pool), link(pool, purpose=EVENTS) as opened:
        await next_of(opened, "ready")
        await reported(pool, opened)

        _, listed = await request(pool, "GET", "/admin/runs")
        _, run = await request(pool, "GET", f"/admin/runs/{RUN}")

        (summary,) = listed["data"]
        assert summary | {"ranks": run["ranks"], "points": run["points"]} == run
        assert (run["id"], run["owner"], run["state"]) == (RUN, "default", "queued")
        assert (run["size"], run["step"], run["loss"]) == (2, 2, 3.0)
        assert [(each["step"], each["loss"]) for each in run["points"]] == [
            (1, 4.0),
            (2, 3.0),
        ]
        ranks = [(each["rank"], each["state"], each["step"]) for each in run["ranks"]]
        assert ranks == [(0, "running", 2), (1, "running", 1)]
    _, listed = await request(pool, "GET", "/admin/runs")
    (ended,) = listed["data"]
    assert (ended["state"], ended["step"]) == ("cancelled", 2)
    assert ended["ended_at"] > 0


async def test_ranks_have_hashes_of_the_same_step(pool: Pool) -> None:
    digest = "5a" * 32

    async def hashes() -> list[str | None]:
        _, run = await request(pool, "GET", f"/admin/runs/{RUN}")
        return [each["hash"] for each in run["ranks"]]

    async with open_run(pool), link(pool, purpose=EVENTS) as opened:
        await next_of(opened, "ready")
        for rank, step, expected in (
            (0, 100, [digest, None]),
            (1, 100, [digest, digest]),
            (1, 200, [None, digest]),
        ):
            hashed: dict[str, JSON] = {"hash": digest, "hash_step": step}
            opened.send({"event": "progress", "rank": rank, "values": {}, **hashed})
            while await hashes() != expected:
                pass


async def test_other_keys_do_not_see_a_run(pool: Pool) -> None:
    alice = await make_key(pool)
    bob = await make_key(pool, "bob")
    async with open_run(pool, owner="alice"):
        own = await request(pool, "GET", "/admin/runs", key=alice)
        others = await request(pool, "GET", "/admin/runs", key=bob)

        assert [each["id"] for each in own[1]["data"]] == [RUN]
        assert others == (200, {"data": []})
        assert (await request(pool, "GET", f"/admin/runs/{RUN}", key=bob))[0] == 403
        assert (await request(pool, "GET", f"/admin/runs/{RUN}", key=alice))[0] == 200
    assert (await request(pool, "GET", "/admin/runs/none"))[0] == 404


async def test_run_shows_its_workers_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path) as pool:
        assert pool.gateway is not None
        facts: list[Fact] = []
        for node in range(2):
            job, worker_id = member(pool, node), WorkerId(f"wire:w{node}")
            facts.append(JobSubmitted(job))
            facts.append(JobLeased(job.id, worker_id, LeaseNumber(1), "free"))
        await pool.gateway.store.append(facts, pool.gateway.clock.wall())
    async with serving(tmp_path, restarted=True) as pool:
        workers = [
            ScriptedWorker(pool.hub, f"w{node}", kinds=frozenset({JobKind.CALL}))
            for node in range(2)
        ]
        await eventually(lambda: all(each.runs for each in workers))

        _, run = await request(pool, "GET", f"/admin/runs/{RUN}")

    assert run["state"] == "running"
    assert [each["worker"] for each in run["ranks"]] == ["wire:w0", "wire:w1"]
