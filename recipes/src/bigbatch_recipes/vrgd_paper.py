"""Settings of all experiments in the VRGD paper.

Source: Jiang et al., arXiv 2309.13681, equation 9 and section 4.1.
"""

from bigbatch_recipes.recipe import Arm, Arms, Rows

VRGD = "VRGD"
CLIPS: Rows = {"gamma": (0.1, VRGD), "r_max": (1.0, f"{VRGD}, equation 9")}
REPEATS = (5, f"{VRGD}: each test five times")
MEDIAN = (3, f"{VRGD}: the median of three")
TO_TEN = (10.0, f"{VRGD}, 1 / gamma")  # the upper clip by the paper's text

# table 1 as arms of bert-pretrain: the paper's numbers of steps, and a batch size for each of two
# phases. Each column has 512M samples; it follows that nine tenths of them are in the short phase,
# and that columns with one number have it in both phases.
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
    """The arms of one optimizer, first those of the column 64k-32k, which small scales have too.

    A short phase that two columns share is one arm, which the first column names.
    """
    arms: dict[str, Arm] = {}
    for name in ("64k-32k", *COLUMNS):
        short, long, steps = COLUMNS[name]
        lamb: Arm = {**_LAMB, "optimizer": (optimizer, TABLE)}
        source = f"{TABLE}: {steps:,} steps in all"
        short_arm = _arm_name(optimizer, short, "short")
        arms.setdefault(
            short_arm,
            {**lamb, "batch_size": (1024 * short, TABLE), "samples": (SAMPLES["short"], source)},
        )
        long_arm = f"{optimizer}-long" if name == "64k-32k" else f"{optimizer}-{name}-long"
        arms[long_arm] = {
            "init_from": short_arm,
            **lamb,
            **ROWS,
            "batch_size": (1024 * long, TABLE),
            "samples": (SAMPLES["long"], source),
        }
    return arms


def _arm_name(optimizer: str, thousands: int, phase: str) -> str:
    return f"{optimizer}-{phase}" if thousands == 64 else f"{optimizer}-{thousands}k-{phase}"
