"""Do variance-reduced optimizers bear larger rates, and are they better at large batches?"""

HYPOTHESES = """\
Those of the paper (VRGD: section 4, table 5 and figure 2), with either upper clip of r:
1. The largest stable rate of a VR version is above that of its base.
2. With 4,096 samples the test accuracy of a VR version is above that of its base, each at its own
   best rate, and it is so by more than with 64 samples.
3. With 4,096 samples the generalization gap (train minus test accuracy) is below that of its base.
Ours:
4. With r <= 1, VR-SGD and VR-Momentum do not differ from their bases at the mean rate: the rate
   times the mean r of the VR run of the same seed.
5. With 4,096 samples the factors "shrinkage" and "positive-part" are better than the paper's.
"""
RULE = """\
"Above", "below" and "better" are said where the paired 95 % interval over 8 fresh seeds excludes 0;
else the two are not distinguished. Each arm has the rate that was best on held-out training samples
with another seed. A composite is the mean over the four optimizers of the paper's figure 2, for
each seed. A rate is stable if the training with the seed that tunes does not diverge and has more
than 30 % of held-out accuracy, 20 points above chance; the largest stable rate is the largest such
rate of the grid, whose factor is 2. Hypothesis 1 is decided by the exact two-sided sign test over
the pairs of optimizer and batch, at p < .05, for each clip; equal rates count for neither side. A
training that fails or diverges has no score: it is counted, not averaged.
"""
