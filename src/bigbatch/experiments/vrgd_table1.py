"""VRGD's table 1 as arms of bert-pretrain: LAMB and VR-LAMB, a batch size for each of two phases.

The steps are the paper's. That nine tenths of the samples are of the short phase, and which batch
is of which phase in the columns with one number, follows from them: each column has 512M samples.
"""

from bigbatch.experiments.recipe import Arm, Arms
from bigbatch.experiments.vrgd_paper import VRGD

TABLE = f"{VRGD}, table 1"
SIMIGRAD, LONG = (f"SimiGrad's code, BERT-Large, rows of {rows}" for rows in (128, 512))
COLUMNS = {  # batches of the short and the long phase in 1,024 samples, and steps of both
    "16k": (16, 16, 31_250),
    "32k": (32, 32, 15_625),
    "64k-32k": (64, 32, 8_599),
    "64k": (64, 64, 7_820),
    "96k-32k": (96, 32, 6_256),
    "96k": (96, 96, 5_214),
    "128k-64k": (128, 64, 4_301),
}
SAMPLES = {"short": 461_000_000, "long": 51_200_000}  # of a phase

_LAMB: Arm = {
    "policy": ("fixed", TABLE),
    "base_batch": 32_768,
    "lr": 0.005,
    "lr_schedule": ("warm-up 0.2 epochs; polynomial 0.5", "NVIDIA's BERT; the warm-up is ours"),
}
ROWS: Arm = {"length": (512, "Devlin et al."), "predictions": (80, LONG), "micro_batch": 16}


def columns(optimizer: str) -> Arms:
    """Of one optimizer, first the phases of the column 64k-32k, which small scales have too.

    A short phase that two columns share is one arm, and the column that is first names it.
    """
    arms: dict[str, Arm] = {}
    for name in ("64k-32k", *COLUMNS):
        short, long, steps = COLUMNS[name]
        one: Arm = {**_LAMB, "optimizer": (optimizer, TABLE)}
        said = f"{TABLE}: {steps:,} steps in all"
        before = _named(optimizer, short, "short")
        arms.setdefault(
            before,
            {**one, "batch_size": (1024 * short, TABLE), "samples": (SAMPLES["short"], said)},
        )
        after = f"{optimizer}-long" if name == "64k-32k" else f"{optimizer}-{name}-long"
        arms[after] = {
            "init_from": before,
            **one,
            **ROWS,
            "batch_size": (1024 * long, TABLE),
            "samples": (SAMPLES["long"], said),
        }
    return arms


def _named(optimizer: str, thousands: int, phase: str) -> str:
    return f"{optimizer}-{phase}" if thousands == 64 else f"{optimizer}-{thousands}k-{phase}"
