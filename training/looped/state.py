"""A training run's state on disk: written atomically, read back exactly."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

_NAME = "state.pt"


@dataclass
class Progress:
    """How far a run is: steps made, seconds spent training, and the step its descent begins at once that is decided.

    `minutes` is the length that decided it, None where a number of steps did.
    """

    step: int = 0
    seconds: float = 0.0
    descent_from: int | None = None
    minutes: float | None = None

    def check_length(self, minutes: float) -> None:
        """Raise ValueError if a descent that has begun ends a run of another length than `minutes`."""
        if self.minutes is not None and self.minutes != minutes:
            what = f"the run's descent began at step {self.descent_from}, for {self.minutes:g} minutes in all"
            raise ValueError(f"{what}: give --minutes {self.minutes:g}, or another --state folder")


def save(
    folder: Path, progress: Progress, run: dict[str, Any], model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> None:
    """Write the state of a run, described by `run`, into `folder`; a crash leaves the previous one."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{_NAME}.partial"
    with partial.open("wb") as file:
        states = [o.state_dict() for o in optimizers]
        torch.save({"run": run, "progress": vars(progress), "model": model.state_dict(), "optimizers": states}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / _NAME)


def restore(folder: Path, run: dict[str, Any], model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Take up the run in `folder`; a fresh Progress where there is none.

    Raises ValueError where the folder holds a run with other settings than `run`.
    """
    path = folder / _NAME
    if not path.is_file():
        return Progress()
    stored = torch.load(path, map_location=next(model.parameters()).device, weights_only=True)
    other = {key: (stored["run"].get(key), value) for key, value in run.items() if stored["run"].get(key) != value}
    if other:
        told = ", ".join(f"{key} {was!r}, now {now!r}" for key, (was, now) in other.items())
        raise ValueError(f"{path} belongs to another run ({told}); give another --state folder or remove it")
    model.load_state_dict(stored["model"])
    for optimizer, state in zip(optimizers, stored["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return Progress(**stored["progress"])
