"""Handwritten digits that come with scikit-learn: 1,797 real images of 8 x 8, no download.

A demonstration on two cores, not a benchmark: every arm trains the same small network over the
same samples, with one learning rate for the base batch and the square root for any other.

Source of the data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, 1998.
"""

from bigbatch_recipes.datasets.files import DatasetLocation
from bigbatch_recipes.recipe import OURS, Recipe, Sweep, sourced, task
from bigbatch_recipes.vrgd_paper import CLIPS

DIGITS = Recipe(
    name="digits",
    summary="small CNN on scikit-learn's handwritten digits: fixed, scheduled, measured batches",
    paper="a demonstration, of no paper",
    paper_scale={
        **sourced(OURS, epochs=25, target=0.3, min_batch=16, max_batch=512, batch_size=32),
        **sourced(OURS, base_batch=32, micro_batch=128, every=2, lr=0.02),
        **CLIPS,
        # the curves of double=True and virtual_ranks=4 are the same on 1, 2 and 4 ranks
        **sourced(OURS, dropout=0.0, double=False),
    },
    small={},
    paper_samples=1_347,
    parameters=(71_754, 71_754),
    minutes=0.2,
    origin=DatasetLocation(
        "scikit-learn's digits", size="1,797 images of 8 x 8", otherwise="itself"
    ),
    arms={
        "fixed-32": {"policy": "fixed", "every": 8},  # does not decide by what it measures
        "fixed-512": {"policy": "fixed", "batch_size": 512, "every": 8},
        "schedule": {"policy": "schedule", "batch_schedule": "32, x2 every 5 epochs", "every": 8},
        "noise-scale": {
            "policy": "noise-scale",
            "smoothing": "4K samples",
            "warmup": "4K samples",
            "dead_band": 0.1,
        },
        "simigrad": {"policy": "simigrad"},
        "simigrad-vr": {"policy": "simigrad", "optimizer": "vr-momentum"},
    },
    small_sweep=Sweep(
        (
            {"policy": ("fixed",), "batch_size": (32, 128, 512), "lr": (0.01, 0.02, 0.04)},
            {"policy": ("simigrad",), "target": (0.1, 0.3, 0.5), "lr": (0.01, 0.02, 0.04)},
        ),
        tuned=("lr",),
    ),
    **task("digit_images"),
)
