"""The optimizers of the tests on ranks."""

from functools import partial

from torch.optim import AdamW

from bigbatch.optim import LAMB, LARS, VRLAMB, VRLARS, VRSGD, VarianceReduced, VRAdam

MAKE = {
    "VRSGD": partial(VRSGD, lr=0.1),
    "VRMomentum": partial(VRSGD, lr=0.02, momentum=0.9),
    "VRAdam": partial(VRAdam, lr=0.01, weight_decay=0.01),
    "VRLARS": partial(VRLARS, lr=1.0, trust_coefficient=0.02, weight_decay=0.01),
    "VRLAMB": partial(VRLAMB, lr=0.01),
    "VarianceReduced(AdamW)": lambda parameters, **options: VarianceReduced(
        AdamW(parameters, lr=0.01, fused=True), **options
    ),
    "LARS": partial(LARS, lr=1.0, trust_coefficient=0.02, weight_decay=0.01),
    "LAMB": partial(LAMB, lr=0.01),
}

VR = [name for name in MAKE if name.startswith("V")]
