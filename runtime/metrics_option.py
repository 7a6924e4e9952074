"""`--metrics-port`, for every command that has a worker. Nothing of it is loaded unless it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ouro_build.artifacts.console import require_extra

if TYPE_CHECKING:
    from ouro_build.runtime.worker import Worker


def _with_extra(_: click.Context, __: click.Parameter, port: int | None) -> int | None:
    """Told before a worker is loaded for nothing."""
    if port is not None:
        require_extra("metrics", ("prometheus_client",), "--metrics-port")
    return port


metrics_port = click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    callback=_with_extra,
    help="Serve Prometheus metrics on this port, every interface; 0: any that is free.",
)


@contextmanager
def serving_metrics(worker: Worker, port: int | None, say: Callable[[str], None]) -> Iterator[None]:
    """Serve metrics of `worker` while the block runs, if a `port` is given, and `say` where.

    Raises UsageError if the port is taken.
    """
    if port is None:
        yield
        return
    from ouro_build.runtime.metrics import serve

    at, close = serve(worker, port)
    say(f"metrics on port {at}: /metrics")
    try:
        yield
    finally:
        close()
