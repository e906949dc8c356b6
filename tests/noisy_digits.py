"""The command with one recipe more: the digits with dropout, so that random states matter.

With KILLED_AT=n, rank 1 of the first attempt under torchrun is killed before its n-th backward.
"""

import os
import signal
from dataclasses import replace
from functools import partial

from bigbatch.cli import main
from bigbatch.recipes import RECIPES, digits

NAME = "noisy-digits"


def build(settings, *, dropout):
    task = digits.build(settings, dropout=dropout)
    mortal = os.environ.get("RANK") == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    left = [int(os.environ.get("KILLED_AT", "0")) * mortal]

    def loss_of(model, batch):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return task.loss_of(model, batch)

    return replace(task, loss_of=loss_of)


def register():
    RECIPES["digits"] = replace(digits.DIGITS, build=partial(build, dropout=0.0))
    RECIPES[NAME] = replace(
        digits.DIGITS,
        name=NAME,
        settings=digits.DIGITS.settings.changed({"recipe": NAME}),
        build=partial(build, dropout=0.25),
    )


if __name__ == "__main__":
    register()
    main()
