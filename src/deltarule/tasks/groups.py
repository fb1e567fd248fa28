"""Word problems of groups: after every element, the product of all elements so far.

    B  b  a  b  ...        B begins the row; elements of the group, uniform and independent
    .  b  ba bab           the label at each place: the product up to it

Over S_3 this is a solvable problem, over A_5 and S_5 one that no shallow circuit computes.

Source: "The Illusion of State in State-Space Models" (arXiv 2404.08819), section 4.1, as used in
DeltaProduct (arXiv 2502.10297), section 5.1.
"""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations
from typing import Literal, get_args

import numpy as np

from deltarule.nearest import check_known
from deltarule.nn.checks import check_least
from deltarule.tasks.batch import NO_LABEL, Array, Batch

Group = Literal["S_2", "S_3", "S_4", "A_5", "S_5"]


@dataclass(frozen=True)
class Config:
    """Which group, and how many elements to multiply."""

    group: Group = "S_3"
    """S_n are all permutations of n things, A_5 the even ones of five."""
    length: int = 32
    """Elements in a row, which has one token more: the one that begins it."""

    def __post_init__(self) -> None:
        check_known("group", self.group, get_args(Group))
        check_least(self, 1, "length")

    @property
    def order(self) -> int:
        """Elements of the group; the token that begins a row is this number."""
        return len(elements(self.group))

    @property
    def vocab_size(self) -> int:
        """One token for each element, and one to begin."""
        return self.order + 1

    @property
    def chance(self) -> float:
        """Accuracy of guessing an element."""
        return 1 / self.order


@cache
def elements(group: Group) -> Array:
    """The permutations of a group in the order of the alphabet, [order, n]; the first is 1."""
    every = np.array(list(permutations(range(int(group[2:])))))
    if group.startswith("A"):
        # Even: an even number of pairs is out of order.
        every = every[np.triu(every[:, :, None] > every[:, None]).sum((1, 2)) % 2 == 0]
    every.flags.writeable = False
    return every


@cache
def products(group: Group) -> Array:
    """The table [order, order] of a times b: first b, then a, so that (a b)[i] = a[b[i]]."""
    own = elements(group)
    # Numbers of one digit to a place tell permutations apart, in the order of the alphabet.
    weights = len(own[0]) ** np.arange(len(own[0]))[::-1]
    table = np.searchsorted(own @ weights, own[:, own] @ weights)
    table.flags.writeable = False
    return table


def running_products(group: Group, words: Array) -> Array:
    """The product of each row's elements so far, [rows, length] like the words."""
    order, table, found = len(products(group)), products(group).reshape(-1), words.T.copy()
    for product, place in pairwise(found):
        place[:] = table.take(product * order + place)
    return found.T


def generate(config: Config, rng: np.random.Generator, rows: int) -> Batch:
    """Rows [rows, length + 1]; nothing is asked at the first place."""
    words = rng.integers(config.order, size=(rows, config.length))
    tokens = np.pad(words, ((0, 0), (1, 0)), constant_values=config.order)
    labels = np.full_like(tokens, NO_LABEL)
    labels[:, 1:] = running_products(config.group, words)
    return Batch(tokens, labels)


def show(config: Config, rng: np.random.Generator) -> str:
    """One row: each element and the product so far, as the arrangements of the first letters."""
    tokens, labels = (x[0, 1:13] for x in generate(config, rng, rows=1))

    def words(chosen: Array) -> str:
        return " ".join("".join("abcde"[i] for i in p) for p in elements(config.group)[chosen])

    return f"element  {words(tokens)}\nproduct  {words(labels)}"
