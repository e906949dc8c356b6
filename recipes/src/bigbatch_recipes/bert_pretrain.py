"""BERT pre-training: masked tokens and next sentences, short rows first, then long ones.

SimiGrad chooses the batches of the short phase. LAMB and VR-LAMB train at one batch each phase, as
VRGD's table 1 does (vrgd_paper.py). A long arm begins from the short one. Task: J. Devlin et al.
"""

from bigbatch_recipes import vrgd_paper
from bigbatch_recipes.datasets import locations
from bigbatch_recipes.recipe import OURS, Arm, Changes, Recipe, Result, Sweep, sourced, task

SAVED_AS = {"vocab": locations.VOCAB}  # of each recipe with tokens
TINY: Changes = {"size": "tiny", "vocabulary": 300}  # the small scale of both recipes
PACKAGES = ("transformers", "tokenizers")  # of the extra `bert`
_SIMIGRAD_LONG: Arm = {
    **vrgd_paper.ROWS,
    "batch_size": (32_768, vrgd_paper.LONG),
    "base_batch": (32_768, vrgd_paper.LONG),
    "policy": ("fixed", vrgd_paper.LONG),
    "samples": (51_200_000, OURS),
    "lr": (0.002, vrgd_paper.LONG),
    "lr_schedule": ("warm-up 4915200 samples power 2; x0.9 every 4915200 samples", vrgd_paper.LONG),
}
_LAMB = {**vrgd_paper.columns("lamb"), **vrgd_paper.columns("vr-lamb")}
_SMALL_LONG: Arm = {"policy": "fixed", "length": 128, "predictions": 20, "samples": 6_000}
_VR: Arm = {"optimizer": ("vr-lamb", vrgd_paper.VRGD)}
_SHORTS = tuple(arm for arm in _LAMB if arm.endswith("short"))


BERT_PRETRAIN = Recipe(
    name="bert-pretrain",
    summary="BERT pre-training in two phases: SimiGrad's batches, and LAMB against VR-LAMB",
    paper="SimiGrad and VRGD",
    paper_scale={
        "epochs": (1, OURS),
        "samples": (400_000_000, vrgd_paper.SIMIGRAD),  # at which its rate is 0
        **sourced(vrgd_paper.SIMIGRAD, policy="simigrad", target=0.8),
        "min_batch": (128, OURS),
        **sourced(vrgd_paper.SIMIGRAD, max_batch=262_144, batch_size=128, base_batch=128),
        **sourced(OURS, micro_batch=64, virtual_ranks=16),
        **sourced(vrgd_paper.SIMIGRAD, optimizer="lamb", lr=0.0006),
        **sourced(
            vrgd_paper.SIMIGRAD, lr_schedule="polynomial 1 over 400M samples", lr_scaling="sqrt"
        ),
        **sourced(vrgd_paper.SIMIGRAD, weight_decay=0.01, decay_all=False, clip=1.0),
        **vrgd_paper.CLIPS,
        "seed": (42, vrgd_paper.SIMIGRAD),
        "device": ("cuda", OURS),
        "precision": ("float16", vrgd_paper.SIMIGRAD),
        "workers": (4, OURS),
        "size": ("large", vrgd_paper.SIMIGRAD),
        **sourced(OURS, vocabulary=30_522, vocab=""),
        **sourced(vrgd_paper.SIMIGRAD, dropout=0.1, length=128),
        **sourced(OURS, predictions=20, draws=16, judged=0),
    },
    small={
        "epochs": 1,
        "target": 0.1,
        "min_batch": 32,
        "max_batch": 512,
        "batch_size": 64,
        "base_batch": 64,
        "micro_batch": 32,
        "virtual_ranks": 1,
        "lr": 0.01,
        "lr_schedule": "warm-up 0.1 epochs; polynomial 1",
        "samples": 30_000,
        **TINY,
        "dropout": 0.0,
        "length": 64,
        "predictions": 10,
        "judged": 500,
    },
    paper_samples=461_000_000,  # of VRGD's 8,599 steps about 7,037 of 65,536, the rest longer rows
    paper_ranks=16,
    parameters=(534_830, 336_226_108),
    minutes=1.5,
    origin=locations.PLAIN_TEXT,
    arms={
        "simigrad-short": {},
        "simigrad-long": {"init_from": "simigrad-short", **_SMALL_LONG},
        "lamb-short": {"policy": "fixed"},
        "lamb-long": {"init_from": "lamb-short", **_SMALL_LONG},
        "vr-lamb-short": {"policy": "fixed", **_VR},
        "vr-lamb-long": {"init_from": "vr-lamb-short", **_SMALL_LONG, **_VR},
    },
    paper_arms={
        "simigrad-short": {},
        "simigrad-long": {"init_from": "simigrad-short", **_SIMIGRAD_LONG},
        **_LAMB,
    },
    small_sweep=Sweep(
        ({"arm": ("simigrad-short", "lamb-short", "vr-lamb-short"), "lr": (0.005, 0.01, 0.02)},),
        ("lr",),
    ),
    paper_sweep=Sweep(
        (
            {"arm": ("simigrad-short",), "target": (0.75, 0.8), "lr": (0.0004, 0.0006)},
            {"arm": _SHORTS, "lr": (0.0025, 0.005, 0.01)},
        ),
        ("lr",),
    ),
    paper_seeds=vrgd_paper.MEDIAN,
    results={"table-1": Result(arms=tuple(_LAMB))},
    packages=PACKAGES,
    saved_as=SAVED_AS,
    **task("masked_tokens", "outline"),
)
