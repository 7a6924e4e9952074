"""Batches of tokens: a fixed function of seed and step, so that a resumed run reads what the first would have read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Stored = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]


class Tokens:
    """The uint16 array `tokens` of an npz file, cut into windows whose offset and order change with every pass."""

    def __init__(self, path: Path, context: int, seed: int) -> None:
        with np.load(path) as file:
            self._tokens: Stored = file["tokens"]
        self.count = len(self._tokens)
        self._context = context
        self._seed = seed
        self._passes: dict[int, tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int]] = {}
        self.windows = (len(self._tokens) - 1) // context - 1
        if self.windows < 1:
            raise ValueError(f"{path}: {len(self._tokens)} tokens do not make one window of {context}")

    def batch(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, int64 [rows, context] each."""
        first = step * rows
        drawn = [self._window(i // self.windows, i % self.windows) for i in range(first, first + rows)]
        return _pair(np.stack(drawn))

    def in_order(self, rows: int, limit: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Batches of all windows as they stand, or of the first `limit`, for evaluation."""
        count = min(limit or self.windows, self.windows)
        cut = [self._tokens[i * self._context : (i + 1) * self._context + 1] for i in range(count)]
        return [_pair(np.stack(cut[i : i + rows])) for i in range(0, count, rows)]

    def _window(self, epoch: int, position: int) -> Stored:
        order, offset = self._pass(epoch)
        start = int(order[position]) * self._context + offset
        return self._tokens[start : start + self._context + 1]

    def _pass(self, epoch: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], int]:
        if epoch not in self._passes:
            random = np.random.default_rng((self._seed, epoch))
            self._passes = {epoch: (random.permutation(self.windows), int(random.integers(self._context)))}
        return self._passes[epoch]


def _pair(windows: Stored) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(windows.astype(np.int64))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
