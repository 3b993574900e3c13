"""Scores of models that need no training loop, on the held-out part: what a trained model has to beat.

Text: interpolated bigram and trigram models of bytes, smoothed after Witten and Bell (IEEE Trans. Inform. Theory 37,
1991). A context h that was followed c(h) times, by t(h) different bytes, gives t(h) / (c(h) + t(h)) of its weight to
the next shorter context, and the empty one to the uniform distribution over 256 bytes:

    P(w | h) = (c(h w) + t(h) P(w | h without its first byte)) / (c(h) + t(h))

No parameter is fitted, so none can be fitted to the held-out part, and no probability is zero. Counted over the whole
training part. On the reference text both scores lie within 1 % of interpolated Kneser-Ney with estimated discounts.

Scored are the bytes that the held-out windows have as targets: all but the first of the held-out part. The second has
one byte of context only, and gets its bigram probability from the trigram model too.

Counts are dense over the bytes that occur (k of them: k**3 counters, about 100 in English text, at most 256, which is
134 MB for a while). About 0.1 s per MB of text.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_CHUNK = 1 << 22  # bytes of text whose n-gram numbers (8 bytes each) exist at a time


def text(train: np.ndarray, val: np.ndarray) -> dict[str, float]:
    """Mean bits per scored byte of `val` under both models of `train`; (n,) uint8 each, `val` of at least two bytes."""
    train, val, k = _compact(train, val)

    # P(w), P(w | v) as tables; P(w | u v) only where it is asked for
    count1 = _count(train, 1, k)
    distinct1 = np.count_nonzero(count1)
    p1 = (count1 + distinct1 / 256) / (count1.sum() + distinct1)
    count2 = _count(train, 2, k).reshape(k, k)
    p2 = (count2 + _distinct(count2)[:, None] * p1) / (count2.sum(1) + _distinct(count2))[:, None]
    count3 = _count(train, 3, k).reshape(k * k, k)
    seen3, distinct3 = count3.sum(1), _distinct(count3)

    bigram = sum(float(-np.log2(p2.reshape(-1)[number]).sum()) for number in _ngrams(val, 2, k))
    trigram = float(-np.log2(p2[val[0], val[1]]))
    for number in _ngrams(val, 3, k):
        context, shorter = number // k, number % (k * k)
        weight = distinct3[context]
        p3 = (count3.reshape(-1)[number] + weight * p2.reshape(-1)[shorter]) / (seen3[context] + weight)
        trigram -= float(np.log2(p3).sum())
    num_targets = len(val) - 1
    return {"bigram_bits_per_byte": bigram / num_targets, "trigram_bits_per_byte": trigram / num_targets}


def regression(train: np.ndarray, val: np.ndarray) -> dict[str, float]:
    """Mean squared error on `val` of always answering the mean of `train`; (n, num_outputs) float32 each."""
    mean = train.mean(axis=0, dtype=np.float64)
    return {"mean_mse": float(np.mean((val - mean) ** 2))}


def classification(train: np.ndarray, val: np.ndarray, num_classes: int) -> dict[str, float]:
    """Cross-entropy in nats on `val` of always answering the class frequencies of `train`; (n,) int64 each.

    One is added to every class count, so that a class seen in `val` only has a probability.
    """
    frequency = (np.bincount(train, minlength=num_classes) + 1) / (len(train) + num_classes)
    return {"class_frequency_cross_entropy": float(-np.log(frequency[val]).mean())}


def _compact(train: np.ndarray, val: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Both texts with the k bytes that occur in them renumbered 0 to k - 1, which keeps the count tables small."""
    occurs = np.zeros(256, bool)
    occurs[train] = True
    occurs[val] = True
    number = (np.cumsum(occurs) - 1).astype(np.uint8)
    return number[train], number[val], int(occurs.sum())


def _ngrams(data: np.ndarray, order: int, k: int) -> Iterator[np.ndarray]:
    """Number (base k, oldest byte first) of each run of `order` bytes, in chunks of int64."""
    num_runs = len(data) - order + 1
    for start in range(0, num_runs, _CHUNK):
        stop = min(start + _CHUNK, num_runs)
        number = data[start:stop].astype(np.int64)
        for shift in range(1, order):
            number *= k
            number += data[start + shift : stop + shift]
        yield number


def _count(data: np.ndarray, order: int, k: int) -> np.ndarray:
    """How often each run of `order` bytes occurs, (k**order,) int64."""
    chunks = (np.bincount(number, minlength=k**order) for number in _ngrams(data, order, k))
    total = next(chunks, np.zeros(k**order, np.int64))  # no second array of k**order counters for a text of one chunk
    for counts in chunks:
        total += counts
    return total


def _distinct(counts: np.ndarray) -> np.ndarray:
    """Different bytes seen after each context (row); 1 after an unseen one: all weight to the shorter."""
    return np.maximum(np.count_nonzero(counts, axis=1), 1)
