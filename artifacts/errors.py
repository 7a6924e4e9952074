"""Every error this project raises on purpose.

    OuroError                exit 1
    ├── UsageError           exit 2   a value a flag cannot have
    ├── MissingExtraError    exit 1   a command needs an extra that is not installed
    ├── BuildError           exit 1
    │   ├── CheckpointError            the model's files cannot be used
    │   ├── BudgetError                what was asked for does not fit in memory
    │   ├── CompileError               a kernel could not be compiled, or is over a limit
    │   └── OutputError                the output exists, or cannot be written
    ├── ArtifactError        exit 4   the artifact is damaged or not to be trusted
    ├── FitError             exit 3   the artifact does not fit this machine
    │   └── VersionError               its format is another than this software's
    ├── RequestError         exit 1   a request that cannot be served
    └── DeviceError          exit 1   a CUDA call failed
        ├── NoDeviceError   exit 3   there is no GPU to use: no driver, or no device
        └── RestoreError               a graph cannot be restored

Each says what was wrong, where (file, field, figures), and what to do next.
"""

from __future__ import annotations


class OuroError(Exception):
    """Base of the tree. `what` went wrong, `where` it was seen, and the `hint` for what to do next."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what, where, hint)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what}" + (f"\n{self.hint}" if self.hint else "")


class UsageError(OuroError):
    """A value that a flag or argument cannot have."""

    exit_code = 2


class MissingExtraError(OuroError):
    """A command needs packages of an extra that is not installed."""


class BuildError(OuroError):
    """An artifact cannot be built from this input."""


class CheckpointError(BuildError):
    """The model's files are missing, malformed, or mean arithmetic that is not supported."""


class BudgetError(BuildError):
    """What was asked for does not fit in the memory it was given."""


class CompileError(BuildError):
    """A kernel could not be compiled for a GPU, or is over one of its limits."""


class OutputError(BuildError):
    """The output exists already, or cannot be written."""


class ArtifactError(OuroError):
    """The artifact is damaged, incomplete, or holds what it should not."""

    exit_code = 4


class FitError(OuroError):
    """The artifact is sound but cannot run on this machine."""

    exit_code = 3


class VersionError(FitError):
    """The artifact's format is one that this software does not know."""


class RequestError(OuroError):
    """A request that this worker cannot serve."""


class DeviceError(OuroError):
    """A CUDA call failed; the work in flight is lost, results before it are not."""


class NoDeviceError(DeviceError):
    """There is no GPU to use: no bindings, no driver, or no device. To a command that needs one, the machine does not fit."""

    exit_code = 3


class RestoreError(DeviceError):
    """A plan's graph could not be restored; the plan can still be launched kernel by kernel."""
