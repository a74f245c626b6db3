"""What ends a run, as its submitter sees it."""

from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from shoal.client.training_run import RunFailed, TrainingRun
from shoal.training.launch.member import LeftOut
from shoal.training.launch.rank_process import ScriptFailed

LEFT = LeftOut("the run goes on without this machine")
FAILED = ScriptFailed("rank 1 was ended by SIGKILL")


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        ([FAILED, ScriptFailed("rank 0 is alone")], FAILED),
        ([CancelledError("1 of 2 members left"), FAILED], FAILED),
        ([LEFT, FAILED], FAILED),
        ([LEFT, CancelledError("cancelled")], LEFT),
    ],
)
def test_run_fails_with_the_first_error_from_which_others_follow(
    errors: list[Exception], cause: Exception
) -> None:
    members: Any = [Future() for _ in errors]
    run = TrainingRun(None, None, "token", members, 1)  # type: ignore[arg-type]  # unused
    for member, error in zip(members, errors, strict=True):
        member.set_exception(error)

    with pytest.raises(RunFailed, match=str(cause)) as failed:
        run.result()
    assert failed.value.__cause__ is cause
