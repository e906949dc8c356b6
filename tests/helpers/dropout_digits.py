"""The command with one recipe more: the digits with dropout, so that random states matter.

With KILLED_AT=n, the last rank of the first attempt under torchrun is killed before its n-th
backward; with RAISES_AT=n it raises an error there.
"""

import os
import signal
from dataclasses import replace
from itertools import count

from bigbatch.cli import main
from bigbatch_recipes import digits
from bigbatch_recipes.recipe import OURS, sourced
from bigbatch_recipes.recipe_registry import RECIPES

NAME = "noisy-digits"


def loss(settings):
    plain = digits.DIGITS.loss(settings)
    last = int(os.environ.get("RANK", "-1")) + 1 == int(os.environ.get("WORLD_SIZE", "1"))
    mortal = last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    killed, raises = (int(os.environ.get(name, "0")) for name in ("KILLED_AT", "RAISES_AT"))
    numbers = count(1)

    def loss_of(model, batch):
        number = next(numbers) * mortal
        if number and number == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if number and number == raises:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return plain(model, batch)

    return loss_of


def register():
    RECIPES["digits"] = replace(digits.DIGITS, loss=loss)
    exact = sourced(OURS, dropout=0.25, double=True, virtual_ranks=4)
    paper_scale = {**digits.DIGITS.paper_scale, **exact}
    RECIPES[NAME] = replace(RECIPES["digits"], name=NAME, paper_scale=paper_scale)


if __name__ == "__main__":
    register()
    main()
