"""``shoal join`` by the wire on which one connection stands for all models.

On Shoal's own wire; and on TealeNet's local network and through a relay.
"""

from harness.ports import free_port
from live.programs import (
    TINY,
    GatedModel,
    Pool,
    Program,
    Programs,
    answer_to,
    eventually,
    text_in,
)
from models.tiny_answers import ANSWERS

STORY = "Tell me a story."
ONE_MODEL = ("--model", f"tiny={TINY}")
TINY_MODEL = (*ONE_MODEL, "--wire", "tealenet")
TWO_MODELS = (*TINY_MODEL, "--model", f"twin={TINY}")


PASSCODE = ("--passcode", "wildlife")
SECRET = ("--tealenet-passcode", "wildlife")
OPEN = ("--tealenet-open", "--relay-open")


def join(programs: Programs, url: str, *flags: str) -> Program:
    """Start a worker."""
    return programs.run("join", url, "--json", "--name", "one", *flags)


def models(pool: Pool) -> list[str]:
    return sorted(name for each in pool.workers() for name in each["models"])


def ids(pool: Pool) -> list[str]:
    return sorted(each["id"] for each in pool.workers())


def answers(pool: Pool, question: str = "ping", model: str = "tiny") -> bool:
    with pool.client() as client, answer_to(client, question, model) as stream:
        return "".join(text_in(stream)) == ANSWERS[question]


def test_all_models_join_and_leave_with_one_connection(programs: Programs) -> None:
    pool = programs.serve()
    worker = pool.join("one", *ONE_MODEL, "--model", f"twin={TINY}")
    said = [worker.event("joined")["model"] for _ in range(2)]

    assert said == ["tiny", "twin"]
    both = ["shoal:one/tiny", "shoal:one/twin"]
    eventually(lambda: ids(pool) == both, "it joined with each model")
    assert answers(pool, STORY, "tiny")
    assert answers(pool, STORY, "twin")

    assert worker.terminate() == 0
    eventually(lambda: not pool.workers(), "both models are gone")


def test_dead_engine_withdraws_only_its_model(
    programs: Programs, slow_model: GatedModel
) -> None:
    pool = programs.serve()
    slow_model.go_on.set()
    flags = (*slow_model.flags, "--engine", "embedded", "--model", "tiny")
    worker = pool.join("one", *flags, "--model", f"twin={TINY}")
    for _ in range(2):
        worker.event("joined")

    slow_model.close()
    assert worker.event("left")["model"] == "tiny"
    eventually(lambda: ids(pool) == ["shoal:one/twin"], "the coordinator knows")

    assert answers(pool, model="twin")


def test_worker_started_before_its_coordinator_joins_at_its_port(
    programs: Programs,
) -> None:
    port = free_port()
    worker = join(programs, f"tcp://127.0.0.1:{port}", *PASSCODE, *TWO_MODELS)
    assert "connection refused" in worker.event("waiting")["reason"]

    pool = programs.serve("--tealenet-port", str(port), *SECRET)
    worker.event("joined")

    eventually(lambda: models(pool) == ["tiny", "twin"], "it joined with each model")
    assert {each["protection"] for each in pool.workers()} == {"plain"}
    assert answers(pool)


def test_relay_worker_rejoins_a_restarted_coordinator(programs: Programs) -> None:
    pool = programs.serve(*OPEN)
    worker = join(programs, pool.url, *TINY_MODEL)
    worker.event("joined")
    eventually(lambda: models(pool) == ["tiny"], "it was met")
    pool.program.kill()
    worker.event("lost")

    pool = programs.serve(*OPEN, port=pool.port)
    worker.event("joined")

    eventually(lambda: models(pool) == ["tiny"], "it was met again")
    assert answers(pool)


def test_worker_joins_as_a_node_of_a_relay(programs: Programs) -> None:
    pool = programs.serve(*OPEN)
    relay = f"{pool.url.replace('http', 'ws', 1)}/ws"
    join(programs, relay, *TINY_MODEL).event("joined")

    eventually(lambda: models(pool) == ["tiny"], "it was met")
    (worker,) = pool.workers()
    assert worker["protection"] == "teale"
    assert answers(pool, STORY)


def test_worker_is_admitted_by_the_cluster_passcode(programs: Programs) -> None:
    pool = programs.serve(*SECRET)
    url = f"tcp://127.0.0.1:{pool.ready['ports']['tealenet']}"
    join(programs, url, *PASSCODE, *TINY_MODEL).event("joined")

    eventually(lambda: models(pool) == ["tiny"], "it was met")
    assert answers(pool)
