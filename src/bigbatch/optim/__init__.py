"""Optimizers that scale each parameter's step by its gradient signal-to-noise ratio (GSNR)."""

from bigbatch.optim.trust_ratio import LAMB, LARS
from bigbatch.optim.variance_reduced import VarianceReduced
from bigbatch.optim.vr_optimizers import VRLAMB, VRLARS, VRSGD, VRAdam

__all__ = ["LAMB", "LARS", "VRLAMB", "VRLARS", "VRSGD", "VRAdam", "VarianceReduced"]
