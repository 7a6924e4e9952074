"""Trains the small looped model and writes checkpoint, model card and held-out text.

python training/train.py --data DIR --out DIR --minutes 3
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from looped.card import Run, model_card
from looped.data import Tokens
from looped.evaluate import evaluate, greedy
from looped.export import rounded, write_checkpoint, write_held_out
from looped.model import LoopedModel, Shape
from looped.objective import Objective, objective
from looped.optimizer import Course, optimizers
from looped.state import restore, save
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from tokenizers import Tokenizer
from torch import Tensor

_EVALUATED = 8  # held-out windows looked at where there is no GPU, which would take hours for all
_SECONDS = 5.0  # after which the time is looked at, if 50 steps take longer
_STORED, _PROMPTS = 8, 10  # held-out texts stored beside the model, and others that it continues
_PROMPT_TOKENS, _CONTINUED = 32, 64

Step = Callable[[LoopedModel, Tensor, Tensor, torch.dtype, Objective], tuple[Tensor, Tensor, Tensor]]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="where checkpoint and card go")
    parser.add_argument("--state", type=Path, help="where the run's state is kept, to be resumed from (default: OUT/state)")
    parser.add_argument("--minutes", type=float, default=3.0, help="training time, evaluation not counted (default: 3)")
    parser.add_argument("--steps", type=int, help="exactly so many steps instead, whatever they take")
    parser.add_argument("--rows", type=int, default=64, help="sequences a step (default: 64)")
    parser.add_argument("--rate", type=float, default=Course.rate, help=f"peak learning rate (default: {Course.rate})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between saved states (default: 60)")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    return parser.parse_args()


def main() -> None:
    """Train, or go on where a stopped run was, then evaluate and write."""
    given = options()
    torch.manual_seed(given.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = Shape()
    trainer = Trainer(given, shape, device)
    trainer.run()
    finish(given, trainer)


class Trainer:
    """A run: the model, its optimizers and data, and how far it is."""

    def __init__(self, given: argparse.Namespace, shape: Shape, device: torch.device) -> None:
        self.objective = Objective()
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = LoopedModel(shape).to(device)
        self.train = Tokens(given.data / "train.npz", shape.context, given.seed)
        self.held_out = Tokens(given.data / "heldout.npz", shape.context, given.seed)
        self.course = replace(Course(), rate=given.rate)
        self._optimizers = optimizers(self.model, given.rate)
        self._given = given
        self._state = given.state or given.out / "state"
        self._run = {"seed": given.seed, "rows": given.rows, "rate": given.rate, "steps": given.steps, "shape": vars(shape)}
        self._run["objective"] = vars(self.objective)
        self.progress = restore(self._state, self._run, self.model, self._optimizers)
        self.progress.check_length(given.minutes)
        if given.steps:
            self.progress.descent_from = self.course.descent_from(given.steps)
        self._stopped = False
        self._console = Console(stderr=True)
        self._step: Step = objective if given.no_compile or device.type == "cpu" else torch.compile(objective)

    def run(self) -> None:
        """Train to the end of the course, saving the state now and then and where a signal ends it (exit status 130)."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Bar(*columns, console=self._console) as bar:
            task = bar.add_task("training", total=1.0)
            self._loop(lambda text: bar.update(task, completed=self._done(), description=text))
        self.save()
        if self._stopped:
            self._console.print(f"stopped at step {self.progress.step}; the same command goes on from there")
            raise SystemExit(130)

    def _stop(self, *_: object) -> None:
        """Between two steps, so that what is saved is whole."""
        self._stopped = True

    def save(self) -> None:
        """Write the state that a later call resumes from."""
        save(self._state, self.progress, self._run, self.model, self._optimizers)

    def _loop(self, show: Callable[[str], None]) -> None:
        saved = logged = looked = time.monotonic()
        before = self.progress.seconds
        begun = saved
        while not self._ended() and not self._stopped:
            nats, p = self._make_step()
            self.progress.step += 1
            early = self.progress.step % 50 and time.monotonic() - looked < _SECONDS
            if early and not self._ended() and not self._stopped:
                continue
            described = _described(self.progress.step, nats, p)  # waits for the device, so that the seconds are true
            now = looked = time.monotonic()
            self.progress.seconds = before + now - begun
            self._decide()
            show(described)
            if now - logged > 20 or self._ended():
                self._console.print(f"{self.progress.seconds:6.0f} s  {described}")
                logged = now
            if now - saved > self._given.save_every:
                self.save()
                saved = now

    def _make_step(self) -> tuple[Tensor, Tensor]:
        tokens, targets = self.train.batch(self.progress.step, self._given.rows)
        rate = self.course.at(self.progress.step, self.progress.descent_from)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = rate
        loss, nats, p = self._compiled_or_plain(self._to_device(tokens), self._to_device(targets))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        return nats, p

    def _compiled_or_plain(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        try:
            return self._step(self.model, tokens, targets, self.dtype, self.objective)
        except Exception as error:
            if self._step is objective:
                raise
            self._console.print(f"torch.compile failed ({type(error).__name__}: {error}); going on without it")
            self._step = objective
            return self._step(self.model, tokens, targets, self.dtype, self.objective)

    def _to_device(self, tokens: Tensor) -> Tensor:
        return tokens.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tokens

    def _decide(self) -> None:
        """Begin the descent once the constant part has used its share of the time."""
        constant = self._given.minutes * 60 * (1 - self.course.descent)
        if self.progress.descent_from is None and self.progress.seconds >= constant:
            self.progress.descent_from = self.progress.step
            self.progress.minutes = self._given.minutes

    def _ended(self) -> bool:
        start = self.progress.descent_from
        last = self._given.steps or (None if start is None else self.course.last_step(start))
        return last is not None and self.progress.step >= last

    def _done(self) -> float:
        if self._given.steps:
            return self.progress.step / float(self._given.steps)
        return self.progress.seconds / float(self._given.minutes * 60)


def finish(given: argparse.Namespace, trainer: Trainer) -> None:
    """Evaluate the bfloat16 checkpoint and write everything that ships."""
    model = rounded(trainer.model)
    raw = (given.data / "tokenizer.json").read_bytes()
    write_checkpoint(given.out, model, raw)
    stored, prompts = held_out_texts(json.loads((given.data / "quotable.json").read_text()))
    pairs = [(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]])) for _, ids in stored]
    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    write_held_out(given.out / "heldout.json", stored, {name: evaluate(model, pairs, t).loss for name, t in types.items()})
    limit = None if trainer.device.type == "cuda" else _EVALUATED
    batches = trainer.held_out.in_order(8, limit)
    figures = evaluate(model, batches, torch.float32)
    rounded16 = evaluate(model, batches, torch.bfloat16).loss
    tokenizer = Tokenizer.from_file(str(given.data / "tokenizer.json"))
    texts = [
        (tokenizer.decode(prompt), tokenizer.decode(greedy(model, prompt, _CONTINUED, torch.float32))) for _, prompt in prompts
    ]
    card = model_card(model, describe(given, trainer), figures, rounded16, texts)
    (given.out / "README.md").write_text(card, encoding="utf-8")
    (given.out / "SOURCES.md").write_bytes((given.data / "SOURCES.md").read_bytes())
    print(card)


def held_out_texts(quotable: dict[str, list[int]]) -> tuple[list[tuple[str, list[int]]], list[tuple[str, list[int]]]]:
    """Texts to store, and others' beginnings to continue: from every package in turn, in the order of their names."""
    by_package: dict[str, list[str]] = {}
    for name in sorted(quotable):
        by_package.setdefault(name.split("/")[0], []).append(name)
    rounds = max(map(len, by_package.values()))
    turns = [names[i] for i in range(rounds) for names in by_package.values() if i < len(names)]
    chosen = [(name, quotable[name]) for name in turns[: _STORED + _PROMPTS]]
    return chosen[:_STORED], [(name, ids[:_PROMPT_TOKENS]) for name, ids in chosen[_STORED:]]


def describe(given: argparse.Namespace, trainer: Trainer) -> Run:
    """The finished run in the card's terms."""
    cuda = trainer.device.type == "cuda"
    length = f"--steps {given.steps}" if given.steps else f"--minutes {given.minutes:g}"
    settings = f"{length} --rows {given.rows} --rate {given.rate} --seed {given.seed}"
    return Run(
        command=f"python training/train.py --data DATA --out OUT {settings}",
        machine=torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU",
        date=datetime.date.today().isoformat(),
        steps=trainer.progress.step,
        rows=given.rows,
        minutes=trainer.progress.seconds / 60,
        seed=given.seed,
        corpus_tokens=trainer.train.count,
        objective=trainer.objective,
    )


def _described(step: int, nats: Tensor, p: Tensor) -> str:
    losses = " ".join(f"{value:.3f}" for value in nats.tolist())
    exits = " ".join(f"{value:.2f}" for value in p.tolist())
    return f"step {step:6}  loss by loop {losses}  exits {exits}"


if __name__ == "__main__":
    main()
