"""Sentences of English that every machine has: the docstrings of Python's own library."""

import re
from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from deltarule.tasks.batch import Array
from deltarule.train.documents import Document, read_documents, split_documents

Split = Literal["training", "validation"]

DOCSTRING = re.compile(rb'"""(.*?)"""', re.DOTALL)
PARAGRAPH = re.compile(rb"\n\s*\n")
SENTENCE_END = re.compile(rb"(?<=[.!?]) (?=[A-Z])")
# Plain words, so that no signature, table or example is taken for a sentence.
SENTENCE = re.compile(rb"[A-Z][A-Za-z0-9 ,;:'\"()/-]{20,200}[.!?]")


class Prose(NamedTuple):
    """Sentences in the order of the text, and where each would start if one space followed each."""

    sentences: list[str]
    starts: Array


@cache
def read_prose(split: Split) -> Prose:
    """All sentences of one part of the documents; none of these is in both parts."""
    return prose_of(read_documents().documents, split)


def prose_of(documents: list[Document], split: Split) -> Prose:
    """The sentences of those documents that are of one part."""
    training, validation = split_documents(documents)
    chosen = training if split == "training" else validation
    sentences = [sentence for document in chosen for sentence in sentences_of(document)]
    return Prose(sentences, np.cumsum([0, *(len(sentence) + 1 for sentence in sentences)]))


def sentences_of(document: Document) -> list[str]:
    """The sentences of a module's docstrings.

    Examples:
        >>> quotes = b'"' * 3
        >>> text = quotes + b"Return the value of f at x. Example: f(2) == 3" + quotes
        >>> sentences_of(Document("f.py", text))
        ['Return the value of f at x.']
    """
    return [
        sentence.decode()
        for docstring in DOCSTRING.findall(document.text)
        for paragraph in PARAGRAPH.split(docstring)
        for sentence in SENTENCE_END.split(b" ".join(paragraph.split()))
        if SENTENCE.fullmatch(sentence)
    ]
