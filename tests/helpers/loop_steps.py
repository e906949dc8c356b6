"""The steps of a loop that is written as users write it."""

import math

from torch.nn.functional import cross_entropy


def loss_of(model, batch):
    x, y = batch
    return cross_entropy(model(x), y)


def trained(train, steps=math.inf, *, passes=1, loss_of=loss_of, spoiled=()):
    """The records of so many steps in so many passes; the losses of some steps are not finite."""
    records = []
    for _ in range(passes):
        for step in train:
            is_spoiled = train.steps + train.skipped in spoiled
            for batch in step:
                loss = loss_of(train.model, batch)
                step.backward(loss * math.inf if is_spoiled else loss)
            records.append(step.update())
            if len(records) == steps:
                return records
    return records
