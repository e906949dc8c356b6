"""A container of several optimizers, as other packages have one."""

from torch.optim import Optimizer


class Container(Optimizer):
    """As torchtitan's OptimizersContainer: its own groups are copies that no step reads."""

    def __init__(self, optimizers, parameters):
        self.optimizers = optimizers
        super().__init__(parameters, {"lr": 99.0})

    def step(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)
