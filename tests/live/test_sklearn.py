"""scikit-learn on workers, of which one is killed during each search."""

import threading

import joblib
import pytest

import shoal
from live.programs import KEY, Programs

LONG = "join-me-please"
FLAGS = ("--join-token", LONG)
FLEET = ("--macfleet-heartbeat-port", "0", "--macfleet-transport-port", "0")


def test_grid_searches_survive_the_loss_of_a_worker(programs: Programs) -> None:
    # Here, for each process of the suite would spend a second on it.
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import GridSearchCV

    coordinator = programs.serve(*FLAGS, *FLEET)
    workers = [
        coordinator.join(name, "--trust-code", "--slots", "1", token=LONG)
        for name in ("one", "two", "three", "four")
    ]
    for worker in workers:
        worker.event("joined")
    features, classes = make_classification(2000, 30, random_state=1)
    search = GridSearchCV(
        RandomForestClassifier(random_state=1),
        {"n_estimators": [20, 40], "max_depth": [4, 8]},
        cv=3,
        n_jobs=-1,
    )
    alone = search.set_params(n_jobs=1).fit(features, classes).cv_results_

    shoal.register_joblib()
    for durable, victim in ((True, workers[1]), (False, workers[2])):
        # In the middle: a search takes some seconds.
        killing = threading.Timer(1.5, victim.kill)
        with (
            shoal.Pool(coordinator.url, KEY, durable=durable) as pool,
            joblib.parallel_config(backend="shoal", pool=pool),
        ):
            killing.start()
            found = search.set_params(n_jobs=-1).fit(features, classes).cv_results_
        killing.join()

        assert found["mean_test_score"] == pytest.approx(alone["mean_test_score"])
        assert search.best_params_["max_depth"] == 8
