"""Optimizers whose every step is scaled by how well its gradient is known."""

from bigbatch.optim.variance_reduced import VRSGD, VarianceReduced, VRAdam

__all__ = ["VRSGD", "VRAdam", "VarianceReduced"]
