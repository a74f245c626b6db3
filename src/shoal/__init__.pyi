from shoal.client.ambient_pool import current_pool as current_pool
from shoal.client.async_pool import AsyncPool as AsyncPool
from shoal.client.errors import CodeRefused as CodeRefused
from shoal.client.errors import ConnectionLost as ConnectionLost
from shoal.client.errors import PlainValuesOnly as PlainValuesOnly
from shoal.client.errors import RemoteTraceback as RemoteTraceback
from shoal.client.errors import TaskError as TaskError
from shoal.client.errors import TaskTimeout as TaskTimeout
from shoal.client.joblib_backend import register_joblib as register_joblib
from shoal.client.pool import Pool as Pool
from shoal.client.training_run import launch as launch
from shoal.domain.errors import ShoalError as ShoalError
from shoal.domain.errors import UnknownTask as UnknownTask
from shoal.domain.errors import WorkerLost as WorkerLost
from shoal.tasks.registry import task as task
from shoal.tasks.running_call import progress as progress
from shoal.tasks.values import Ref as Ref
from shoal.training.launch.script_lines import report as report
from shoal.training.loop.train import train as train
from shoal.training.meeting import is_writer as is_writer

__version__: str
__all__: list[str]
