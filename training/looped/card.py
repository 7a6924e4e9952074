"""The model card: what was trained, how, and the figures that came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from looped.evaluate import Figures
from looped.model import LoopedModel
from looped.objective import Objective


@dataclass(frozen=True)
class Run:
    """A finished training run, as the card tells it."""

    command: str
    machine: str
    date: str
    steps: int
    rows: int
    minutes: float
    seed: int
    corpus_tokens: int
    objective: Objective


def model_card(model: LoopedModel, run: Run, figures: Figures, rounded16: list[float], texts: Sequence[tuple[str, str]]) -> str:
    """Markdown.

    `figures` are of the bfloat16 checkpoint in float32 arithmetic, `rounded16` its losses in bfloat16 arithmetic; `texts`
    are prompts with the model's continuations.
    """
    source = Path(__file__).with_name("card.md.j2").read_text("utf-8")
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False).from_string(
        source
    )
    return template.render(
        shape=model.shape,
        parameters=sum(p.numel() for p in model.parameters()),
        run=run,
        objective=run.objective,
        figures=figures,
        rounded16=rounded16,
        texts=texts,
    )
