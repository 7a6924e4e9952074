"""The self-test: the artifact's oracle, decoded on this machine."""

from __future__ import annotations

import msgspec

from ouro_build.artifacts.oracle import MARGIN_UNIT
from ouro_build.runtime.worker import Worker

CLEAR_MARGIN = {"bfloat16": 0.2, "float32": 0.01}
"""Logits by which the first choice must lead the second for the choice to be held to; closer ones may fall either way.

Two correct implementations differ by rounding: by up to tenths of a logit in bfloat16, by 1e-4 in float32.
"""


class SelfTest(msgspec.Struct, frozen=True):
    """What the self-test saw. `clear` of `tokens` choices were held to the oracle; `wrong` are the steps that differ."""

    executor: str
    tokens: int
    clear: int
    wrong: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Whether there were clear choices, and all of them agreed."""
        return self.clear > 0 and not self.wrong


def self_test(worker: Worker) -> SelfTest:
    """Decode the oracle's prompt with its ids fed, so that one close choice does not decide those after it."""
    oracle = worker.artifact.oracle()
    margin = CLEAR_MARGIN[worker.artifact.manifest.model.dtype]
    ids = oracle.greedy_ids
    (output,) = worker.generate([oracle.prompt_ids], len(ids), ignore_eos=True, feed=[ids])
    return SelfTest(
        executor=worker.executor,
        tokens=len(ids),
        clear=sum(m > margin * MARGIN_UNIT for m in oracle.margins),
        wrong=oracle.disagreements(output.ids, margin),
    )
