"""Whether torch can be measured beside a worker here."""

from __future__ import annotations

from importlib.util import find_spec

from ouro_build.artifacts.errors import MissingExtraError, UsageError
from ouro_build.runtime.paths import NO_CUDA, WorkerPath, torch_has_cuda

NO_TORCH = "torch is not installed"
FLAG = "--baseline torch"


def check_baseline(path: WorkerPath) -> None:
    """Raise MissingExtraError if there is no torch that can use the GPU, UsageError if `path` uses none."""
    if find_spec("torch") is None:
        hint = "Install it with: pip install 'ouro-build[reference]'"
        raise MissingExtraError(NO_TORCH, where=FLAG, hint=hint)
    if not path.on_device:
        raise UsageError("it runs on a CUDA device only", where=FLAG, hint="Leave it out on this machine.")
    if not torch_has_cuda():
        raise MissingExtraError(NO_CUDA, where=FLAG, hint="Install torch with CUDA.")
