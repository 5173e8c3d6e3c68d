"""Find where the probabilities of the labels of a question can be read, and compute them."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from pypto_serving.errors import RequestError

YES_NO = ("Yes", "No")
Kind = Literal["predicate", "choice", "score"]
Step = tuple[int, int]
"""A token of a label: the read that has its log-probability, and its id."""


class Asked(msgspec.Struct, frozen=True):
    """A question to answer: `paths[i]` are the steps of the label of `values[i]`, over the reads of the request."""

    kind: Kind
    name: str | None
    values: list[str | bool]
    paths: list[list[Step]]


class LabelTree:
    """The labels of one question as token sequences. Does not change.

    `nodes` are what the labels begin with, the empty sequence first: at each of them one read of the model gives the
    log-probabilities of all tokens that continue a label there. `paths[i]` are the steps of label i, with reads counted
    as nodes. Labels of one token need one read. Raises RequestError if the tokenizer does not tell the labels apart.
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
    """Return the labels of a question. All have the same length, so none begins another: its tokens cannot either.

    Yes and No are two words that do not begin each other.
    """
    if kind == "predicate":
        return list(YES_NO)
    if kind == "score":
        return list(string.digits[:num_options])
    letters = string.ascii_uppercase
    if num_options <= len(letters):
        return list(letters[:num_options])
    return [first + second for first in letters for second in letters][:num_options]


def encode_labels(labels: Sequence[str], encode: Callable[[str], list[int]]) -> LabelTree:
    """Return the tree of `labels`, which begin an output, so nothing before them joins their tokens."""
    return LabelTree([encode(label) for label in labels])


def probabilities(paths: Sequence[Sequence[Step]], reads: Sequence[Mapping[int, float]]) -> list[float]:
    """Return the probability of each label among all labels, from the log-probabilities of tokens by read.

    A label has the product of its tokens' probabilities; the sum over the labels is scaled to 1.
    """
    logs = [sum(reads[read][token_id] for read, token_id in path) for path in paths]
    top = max(logs)
    if top == -math.inf:  # the model rules out all of them
        return [1 / len(logs)] * len(logs)
    weights = [math.exp(log - top) for log in logs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def concentration(probabilities: Sequence[float]) -> float:
    """Return how far the largest of n >= 2 probabilities is above 1 / n, as a share of what it can be: 0 to 1."""
    uniform = 1 / len(probabilities)
    return min(1.0, max(0.0, (max(probabilities) - uniform) / (1 - uniform)))
