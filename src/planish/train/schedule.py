"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

import math

from planish.sections import TrainSection


def learning_rate(train: TrainSection, step: int) -> float:
    """Return the learning rate of `step`, counted from 1.

    It rises linearly over `train.warmup` steps to `train.lr`, then stays, falls linearly, or falls along half a
    cosine, reaching zero after the last step.
    """
    if step <= train.warmup:
        return train.lr * step / train.warmup
    done = (step - train.warmup - 1) / max(1, train.steps - train.warmup)
    match train.schedule:
        case "constant":
            return train.lr
        case "linear":
            return train.lr * (1 - done)
        case "cosine":
            return train.lr * (1 + math.cos(math.pi * done)) / 2
