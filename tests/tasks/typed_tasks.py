"""The functions of arrays and models that tests call.

They are not in ``demo_tasks``: each process would import NumPy and Pydantic for them.
"""

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from shoal.tasks.registry import task


class TrainConfig(BaseModel):
    epochs: int
    lr: float = 0.1


class Trained(BaseModel):
    epochs_done: int
    lr: float


@task(name="demo.schema", schema=TrainConfig)
def by_schema(config: TrainConfig) -> Trained:
    return Trained(epochs_done=config.epochs, lr=config.lr)


@task(name="total")
def total(array: npt.NDArray[np.float64]) -> float:
    return float(array.sum())


@task(name="ones")
def ones(size: int) -> npt.NDArray[np.float64]:
    return np.ones(size)


@task(name="double")
def double(array: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    array *= 2
    return array
