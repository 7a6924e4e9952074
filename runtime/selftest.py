"""The self-test: the artifact's oracle, decoded on this machine."""

from __future__ import annotations

import math

import msgspec

from ouro_build.artifacts.model import ModelConfig
from ouro_build.runtime.worker import Worker

_FLOAT32_MARGIN = 0.01
_BFLOAT16_MARGIN = 0.2
_BFLOAT16_LAYERS = 8


def clear_margin(model: ModelConfig) -> float:
    """Logits by which the oracle's first choice must lead the second for a worker of `model` to be held to it.

    Right implementations differ by rounding, and closer choices may fall either way. float32 leaves 1e-4 of a logit. In
    bfloat16 every layer rounds anew and all of them run again in every loop: the errors are independent, so they grow
    as the square root of loops x layers. 0.2 was seen to suffice for 8 of them; 96 then have 0.69, and two right executions
    of that depth have been seen to differ by 0.6.
    """
    if model.dtype == "float32":
        return _FLOAT32_MARGIN
    return _BFLOAT16_MARGIN * math.sqrt(max(1, model.loops * model.layers / _BFLOAT16_LAYERS))


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
    """Decode the oracle's prompt with its ids fed, so that one close choice does not decide those after it.

    Dense, as the oracle was: what sparse decoding keeps of it depends on the text.
    """
    oracle = worker.artifact.oracle()
    margin = clear_margin(worker.artifact.manifest.model)
    ids = oracle.greedy_ids
    (output,) = worker.generate([oracle.prompt_ids], len(ids), ignore_eos=True, feed=[ids], sparse=False)
    return SelfTest(
        executor=worker.executor,
        tokens=len(ids),
        clear=len(oracle.clear(margin)),
        wrong=oracle.disagreements(output.ids, margin),
    )
