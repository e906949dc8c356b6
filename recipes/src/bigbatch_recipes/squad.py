"""SQuAD 1.1: BERT learns to point to the answer of a question in a paragraph.

Both papers evaluate their pre-training with it. It begins from a run of `bert-pretrain`, with that
run's vocabulary; without one from random weights, which is only a test of the code.

Source of the task: P. Rajpurkar et al., SQuAD, 2016.
"""

from bigbatch_recipes import bert_pretrain
from bigbatch_recipes.datasets import locations
from bigbatch_recipes.recipe import OURS, Arms, Recipe, Sweep, sourced, task
from bigbatch_recipes.vrgd_paper import CLIPS, MEDIAN

SIMIGRAD = "SimiGrad's code, SQuAD"
_ARMS: Arms = {"adam": {}, "vr-adam": {"optimizer": "vr-adam"}}


SQUAD = Recipe(
    name="squad",
    summary="SQuAD 1.1 answered by a BERT of bert-pretrain: Adam against VR-Adam",
    paper="SimiGrad and VRGD",
    paper_scale={
        **sourced(SIMIGRAD, epochs=2, policy="fixed", min_batch=24, max_batch=24),
        **sourced(SIMIGRAD, batch_size=24, base_batch=24),
        "micro_batch": (3, OURS),  # eight groups, which variance reduction needs
        **sourced(SIMIGRAD, optimizer="adam", lr=3e-5),
        "lr_schedule": ("warm-up 0.2 epochs; polynomial 1", OURS),
        "clip": (1.0, SIMIGRAD),
        **CLIPS,
        "device": ("cuda", OURS),
        **sourced(SIMIGRAD, precision="float16", size="large"),
        **sourced(OURS, vocabulary=30_522, vocab="", dropout=0.1),
        **sourced(SIMIGRAD, length=384, stride=128),
        "judged": (0, OURS),
    },
    small={
        "epochs": 2,
        "samples": 2_400,
        "lr": 1e-3,
        **bert_pretrain.TINY,
        "dropout": 0.0,
        "length": 256,
        "stride": 128,
        "judged": 300,
    },
    paper_seeds=MEDIAN,
    paper_samples=87_599,  # questions; of the longest there are several windows, about 1 % more
    parameters=(501_250, 334_094_338),
    minutes=1.8,
    origin=locations.SQUAD,
    arms=_ARMS,
    small_sweep=Sweep(({"arm": tuple(_ARMS), "lr": (5e-4, 1e-3, 2e-3)},), tuned=("lr",)),
    paper_sweep=Sweep(({"arm": tuple(_ARMS), "lr": (2e-5, 3e-5, 5e-5)},), ("lr",)),
    packages=bert_pretrain.PACKAGES,
    saved_as=bert_pretrain.SAVED_AS,
    **task("answer_spans", "outline"),
)
