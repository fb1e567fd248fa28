"""What the tasks of the MAD benchmark share: the score, in which every class weighs the same.

    accuracy = mean over classes c of (answers c that were guessed) / (answers c)

A class that is never the answer but was guessed somewhere counts as 0; one that is neither is left
out. So few wrong guesses outside the classes asked for cost much, and a class that is always right
(the last token of compression) is worth a whole share.

Source: the MAD benchmark (arXiv 2403.17844), whose code scores with the default of torchmetrics'
`MulticlassAccuracy`, average="macro".
"""

import numpy as np

from deltarule.tasks.batch import NO_LABEL, Array, Batch


def measure(config: object, batch: Batch, guesses: Array) -> dict[str, float]:
    """The mean over the classes as "accuracy", and as "share_right" the share of labels guessed."""
    asked = batch.labels != NO_LABEL
    answers, given = batch.labels[asked], guesses[asked]
    right, classes = answers == given, int(max(answers.max(), given.max())) + 1
    asked_for, guessed, hits = (
        np.bincount(x, minlength=classes) for x in (answers, given, answers[right])
    )
    counted = asked_for + guessed > 0
    by_class = hits[counted] / np.maximum(asked_for[counted], 1)
    return {"accuracy": float(by_class.mean()), "share_right": float(right.mean())}
