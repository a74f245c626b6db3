"""Requests made from the interface's own description, wrong ones above all.

Schemathesis makes them; a real coordinator with a real engine has to answer each as it
is described, and none with the status of a fault of its own.
"""

from collections.abc import Iterator
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi.checks import (
    ignored_auth,
    negative_data_rejection,
    positive_data_acceptance,
)

from harness.profiles import examples
from live.programs import KEY, PATIENCE, TINY, Pool, Programs
from shoal.gateway.all_operations import OPERATIONS
from shoal.gateway.openapi import openapi_document

# An address that sends wrong keys is soon turned away, and some rules cannot be written
# as a schema: a tool that is chosen must be among the tools.
EXCLUDED = [ignored_auth, positive_data_acceptance]

# What is wrong in a request has to stay so: too long a name, or a field that lacks.
NAME_MAX = 256  # characters of a model's name
SHORT: dict[str, Any] = {
    "max_tokens": 4,
    "max_output_tokens": 4,
    "options": {"num_predict": 4},
}

ENDLESS = {"/admin/live"}  # answers are read to their ends

DOCUMENT = openapi_document(OPERATIONS)
schema = schemathesis.openapi.from_dict(DOCUMENT)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A coordinator with the tiny model, for all requests of this module."""
    programs = Programs(tmp_path_factory.mktemp("schema"))
    running = programs.serve()
    running.joined("w1", "--model", f"tiny={TINY}", "--context", "256")
    yield running
    programs.close()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """Connections that are used again, where each request else looks for a proxy and
    opens one.  No answer changes a later request."""
    with requests.Session() as session:
        session.trust_env = False
        session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        yield session


def for_operation(path: str, method: str) -> Any:
    """Return the test of an operation."""

    @schema.include(path=path, method=method).parametrize()
    @settings(
        max_examples=examples(0.1),
        phases=[Phase.explicit, Phase.generate],
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    def requests_are_answered_as_described(
        case: Any, pool: Pool, session: requests.Session
    ) -> None:
        model = case.body.get("model") if isinstance(case.body, dict) else None
        if isinstance(model, str) and 0 < len(model) <= NAME_MAX:
            # Of a model that there is, so that the other fields matter.
            case.body = {**case.body, "model": "tiny"}
            if case.meta.generation.mode.is_positive:
                case.body = {**SHORT, **case.body}

        case.call_and_validate(
            base_url=pool.url,
            session=session,
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=PATIENCE,
            # It takes parameters for sent that its own client leaves out of the URL.
            excluded_checks=[
                *EXCLUDED,
                *[negative_data_rejection] * (case.method == "GET"),
            ],
        )

    return requests_are_answered_as_described


# A test with a name of its own for each operation: Schemathesis gives all that it makes
# of one test the same id.
globals().update(
    {
        f"test_{operation['operationId']}_is_answered_as_described": for_operation(
            path, method.upper()
        )
        for path, methods in DOCUMENT["paths"].items()
        if path not in ENDLESS
        for method, operation in methods.items()
    }
)
