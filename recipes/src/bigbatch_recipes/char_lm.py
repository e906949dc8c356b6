"""A small causal transformer over characters: Shakespeare, or Python's own documentation.

A demonstration that needs no download, not a benchmark; the full settings are nanoGPT's, where
they apply. A sample is a window of the text; the windows of an epoch do
not overlap. The last tenth of the text is held out.

Source of the settings: A. Karpathy, nanoGPT, config/train_shakespeare_char.py and train.py.
"""

from bigbatch_recipes.datasets.files import DatasetLocation
from bigbatch_recipes.recipe import OURS, Recipe, Sweep, sourced, task
from bigbatch_recipes.vrgd_paper import CLIPS

NANOGPT = "nanoGPT's shakespeare_char"

CHAR_LM = Recipe(
    name="char-lm",
    summary="small causal transformer over characters: Shakespeare, or Python's own texts",
    paper="a demonstration, of no paper",
    paper_scale={
        **sourced(NANOGPT, length=256, depth=6, heads=6, width=384, dropout=0.2),
        "epochs": (82, NANOGPT),  # 5,000 steps of 64 windows
        **sourced(NANOGPT, batch_size=64, base_batch=64, optimizer="adam", lr=1e-3),
        "lr_schedule": ("warm-up 6400 samples; cosine", NANOGPT),  # there to a tenth, here to 0
        **sourced(NANOGPT, weight_decay=0.1, decay_all=False, clip=1.0),
        **CLIPS,
        "device": ("cuda", OURS),
        "precision": ("bfloat16", NANOGPT),
        **sourced(OURS, target=0.3, min_batch=32, max_batch=1024, micro_batch=64),
        **sourced(OURS, virtual_ranks=2),
    },
    small={
        "length": 64,
        "depth": 2,
        "heads": 4,
        "width": 64,
        "dropout": 0.0,
        "epochs": 3,
        "lr": 3e-3,
        "lr_schedule": "warm-up 1000 samples; cosine",
        "max_batch": 512,
        "samples": 15_000,
    },
    paper_samples=3_921,
    parameters=(120_704, 10_844_288),
    minutes=1.4,
    origin=DatasetLocation(
        "tiny Shakespeare",
        folders=("tinyshakespeare",),
        files=("input.txt",),
        source="github.com/karpathy/char-rnn, data/tinyshakespeare",
        size="1,115,394 characters",
        otherwise="the documentation inside Python's standard library",
    ),
    arms={
        "fixed": {"policy": "fixed"},
        "simigrad": {"policy": "simigrad"},
        "simigrad-vr": {"policy": "simigrad", "optimizer": "vr-adam"},
    },
    small_sweep=Sweep(({"arm": ("fixed", "simigrad"), "lr": (1e-3, 3e-3, 1e-2)},), tuned=("lr",)),
    paper_sweep=Sweep(
        ({"arm": ("fixed", "simigrad", "simigrad-vr"), "lr": (5e-4, 1e-3, 2e-3)},), tuned=("lr",)
    ),
    higher_is_better=False,
    **task("characters_ahead"),
)
