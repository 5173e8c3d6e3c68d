"""Find the tokens at which the probabilities of a question's labels can be read, and compute them."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from pypto_serving.errors import RequestError

YES_NO = ("Yes", "No")
Kind = Literal["predicate", "choice", "score"]
Step = tuple[int, int]
"""A token of a label: the index of the read with its log-probability, and the token's id."""


class Asked(msgspec.Struct, frozen=True):
    """A question to answer. `paths[i]` are the steps of the label for `values[i]`, over the reads of the request."""

    kind: Kind
    name: str | None
    values: list[str | bool]
    paths: list[list[Step]]


class LabelTree:
    """The labels of one question as token sequences. Does not change.

    `nodes` are the proper prefixes of the labels, the empty one first. After each node, one read of the model gives the
    log-probabilities of all tokens that continue a label. `paths[i]` are the steps of label i; read i is after node i.
    Labels of one token need only one read. Raises RequestError if one label's tokens equal or begin another's.
    """

    def __init__(self, labels: Sequence[Sequence[int]]) -> None:
        self.nodes: list[tuple[int, ...]] = [()]
        places: dict[tuple[int, ...], int] = {(): 0}
        self.paths: list[list[Step]] = []
        for label in labels:
            path: list[Step] = []
            for i, token_id in enumerate(label):
                begun = tuple(label[:i])
                if begun not in places:
                    places[begun] = len(self.nodes)
                    self.nodes.append(begun)
                path.append((places[begun], token_id))
            self.paths.append(path)
        sequences = {tuple(label) for label in labels}
        if len(sequences) < len(labels) or not sequences.isdisjoint(places):
            message = "this model's tokenizer does not tell the labels of answers apart, so it cannot make decisions"
            raise RequestError(message, code="decisions_unavailable")


def labels_of(kind: Kind, num_options: int) -> list[str]:
    """Return the labels of a question. No label is a prefix of another, so neither are their token sequences.

    All labels have the same length, except for Yes and No.
    """
    if kind == "predicate":
        return list(YES_NO)
    if kind == "score":
        return list(string.digits[:num_options])
    letters = string.ascii_uppercase
    if num_options <= len(letters):
        return list(letters[:num_options])
    return [first + second for first in letters for second in letters][:num_options]


def probabilities(paths: Sequence[Sequence[Step]], reads: Sequence[Mapping[int, float]]) -> list[float]:
    """Return the probability of each label, relative to all labels. `reads[r]` maps token ids to log-probabilities.

    A label's weight is the product of its tokens' probabilities; the weights are scaled to a sum of 1.
    """
    logs = [sum(reads[read][token_id] for read, token_id in path) for path in paths]
    top = max(logs)
    if top == -math.inf:  # the model rules out all labels
        return [1 / len(logs)] * len(logs)
    weights = [math.exp(log - top) for log in logs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def concentration(probabilities: Sequence[float]) -> float:
    """Return (p - 1 / n) / (1 - 1 / n) for the largest p of n >= 2 probabilities: 0 if they are equal, 1 if p is 1."""
    uniform = 1 / len(probabilities)
    return min(1.0, max(0.0, (max(probabilities) - uniform) / (1 - uniform)))
