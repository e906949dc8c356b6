"""What joins the ranks of a training: DistributedDataParallel, or DeepSpeed."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from bigbatch.recipes.engines.ddp import DDP
from bigbatch.recipes.engines.deepspeed import DeepSpeed
from bigbatch.recipes.engines.engine import Engine
from bigbatch.recipes.recipe import Data
from bigbatch.recipes.settings import Settings

ENGINES: dict[str, Callable[[nn.Module, Optimizer, Data, Settings], Engine]] = {
    "ddp": DDP,
    "deepspeed": DeepSpeed,
}
