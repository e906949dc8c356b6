"""How a training runs on several ranks: DistributedDataParallel, or DeepSpeed."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from bigbatch.experiments.engines.ddp_engine import DDP
from bigbatch.experiments.engines.deepspeed_engine import DeepSpeed
from bigbatch.experiments.engines.engine import Engine
from bigbatch.experiments.recipe import Data
from bigbatch.experiments.settings import Settings

ENGINES: dict[str, Callable[[nn.Module, Optimizer, Data, Settings], Engine]] = {
    "ddp": DDP,
    "deepspeed": DeepSpeed,
}
