"""What sparse decoding keeps of a model: agreement with dense decoding, perplexity, retained mass, by key retention.

python training/sparse_quality.py [--retention 0.05,0.1,0.2,0.5,1.0] [--prefix 256] [--json]

The held-out texts stored beside the small model are decoded with their own tokens fed, so that every retention is asked the
same questions: a dense prompt of `--prefix` tokens, then every token a decode row. By the reference, in float32, on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ouro_build.artifacts.presets import SHIPPED
from ouro_build.builder.oracle import recorded_steps
from ouro_build.builder.source import open_source
from ouro_build.builder.sparse_spec import SparseSpec
from ouro_build.builder.spec import BuildSpec, find_parts
from ouro_build.runtime.engine import Engine, Request

MODEL = "tiny-trained"
MODES = ("dense", "capture", "consume")


@dataclass(frozen=True)
class Quality:
    """Means over `tokens` decoded tokens: `loss` in nats, `agreement` the share whose greedy choice is the dense one's.

    `mass` is the retained mass of every capture, 1 where all keys are retained.
    """

    retention: float
    tokens: int
    agreement: float
    loss: float
    perplexity: float
    mass: float


def decode(texts: Sequence[Sequence[int]], prefix: int, retention: float) -> tuple[NDArray[np.float32], float]:
    """Logits [texts, tokens, vocab] of every token after the first that is decoded, and the mean retained mass."""
    preset = f"preset:{MODEL}"
    source = open_source(preset, dtype="float32", seed=0)
    length = max(map(len, texts))
    spec = BuildSpec(
        preset, find_parts(["sm_90"]), (len(texts),), (length,), max_context=length, sparse=SparseSpec(MODES, retention)
    )
    steps = recorded_steps(source.model, spec.geometry(source.model), spec.parts[0], source.weights, retained_mass=True)
    engine = Engine(steps, steps.kv_blocks, len(texts), sparse=True)
    requests = [Request(t[:prefix], len(t) - prefix, feed=t[prefix:], keep_logits=True) for t in texts]
    for request in requests:
        engine.submit(request)
    engine.run()
    mass = 1.0 if steps.retained_mass is None else steps.retained_mass.record().mean
    return np.stack([np.stack(r.logits[1:]) for r in requests]), mass


def quality(texts: Sequence[Sequence[int]], prefix: int, retention: float, dense: NDArray[np.int64]) -> Quality:
    """Figures of `retention` against the dense choices [texts, tokens]."""
    logits, mass = decode(texts, prefix, retention)
    chosen = logits.argmax(-1)
    wanted = torch.tensor([t[prefix + 1 :] for t in texts])
    loss = torch.nn.functional.cross_entropy(torch.from_numpy(logits).flatten(0, 1).double(), wanted.flatten()).item()
    return Quality(retention, chosen.size, float((chosen == dense).mean()), loss, math.exp(loss), mass)


def table(found: Sequence[Quality]) -> str:
    """Markdown."""
    head = "| keys retained | agreement with dense | perplexity | nats a token | retained mass |\n|---|---|---|---|---|"
    rows = [f"| {q.retention:g} | {q.agreement:.4f} | {q.perplexity:.3f} | {q.loss:.4f} | {q.mass:.4f} |" for q in found]
    return "\n".join([head, *rows])


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--retention", default="0.05,0.1,0.2,0.5,1.0", help="shares of the keys, with commas")
    parser.add_argument("--prefix", type=int, default=256, help="tokens of the dense prompt")
    parser.add_argument("--texts", type=int, default=8, help="held-out texts, of those stored")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    stored = json.loads((SHIPPED[MODEL] / "heldout.json").read_text())["sequences"][: given.texts]
    texts = [text["ids"] for text in stored]
    dense = decode(texts, given.prefix, 1.0)[0].argmax(-1)
    found = [quality(texts, given.prefix, float(r), dense) for r in given.retention.split(",")]
    print(json.dumps([asdict(q) for q in found]) if given.json else table(found))


if __name__ == "__main__":
    main()
