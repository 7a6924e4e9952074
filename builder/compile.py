"""Turns specialisations into cubins, for GPUs that need not be there, on every core.

What a worker process compiles depends on the kernel's source, the specialisation, the architecture and the compilers alone:
it sees a bare environment, an empty Triton cache, and no debug information is emitted.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from ouro_build.artifacts.columns import SCRATCH_ARGUMENTS
from ouro_build.artifacts.errors import CompileError
from ouro_build.artifacts.plan import Specialization
from ouro_build.artifacts.tuning import Entry
from ouro_build.builder.cache import Image, ImageCache, image_key
from ouro_build.builder.cubin import read_cubin
from ouro_build.builder.programmatic import mentions, violations
from ouro_build.builder.toolchain import Toolchain, clean_environment
from ouro_build.builder.tuned import Chosen, entry_error
from ouro_build.kernels import registry

WARP = 32
_TYPE_BYTES = {"i32": 4, "u32": 4, "fp32": 4, "i64": 8, "u64": 8}
_KEPT_TALK = 2000
_FATAL = re.compile(r"ptxas\S*(?: .*)?\b(?:fatal|error)\s*: (?:\(\w+\) )?(?P<why>.*)")


@dataclass(frozen=True)
class Job:
    """One image to make: `key` is its content key, `arch` the architecture, `entry` what of a given tuning table shaped it."""

    key: str
    specialization: Specialization
    arch: str
    entry: Entry | None = None

    def __str__(self) -> str:
        s = self.specialization
        constants = ", ".join(f"{name}={value}" for name, value in s.constants)
        shape = f"{constants}; {s.options.num_warps} warps, {s.options.num_stages} stages"
        by = f", entry {self.entry.place!r} of --tuning" if self.entry else ""
        return f"kernel {s.kernel} for {self.arch} ({shape}){by}"


@dataclass(frozen=True)
class _Failure:
    """A CompileError on its way back from a worker process."""

    what: str
    where: str
    hint: str = ""


@dataclass(frozen=True)
class Compiled:
    """Images by content key; how many of them came from the cache."""

    images: dict[str, Image]
    cached: int


def jobs(
    specializations: Sequence[Specialization],
    arch: str,
    toolchain: Toolchain,
    chosen: Chosen | None = None,
) -> tuple[Job, ...]:
    """What is to be made for `arch`, in the order of `specializations`; `chosen` are the entries that shaped some."""
    entries = chosen or {}
    return tuple(Job(image_key(s, arch, toolchain), s, arch, entries.get(s)) for s in specializations)


def compile_images(
    wanted: Sequence[Job],
    cache: ImageCache,
    workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    refused: dict[str, CompileError] | None = None,
) -> Compiled:
    """An image for every job, from the cache or compiled by up to `workers` processes.

    `progress(done, total)` is told of each. Raises CompileError naming the kernel, the GPU and the figures; with `refused`,
    what the compiler refuses is put there by its key and has no image.
    """
    by_key = {job.key: job for job in wanted}
    images = {key: image for key in by_key if (image := cache.get(key)) is not None}
    cached = len(images)
    progress(cached, len(by_key))
    missing = [job for key, job in by_key.items() if key not in images]
    done = cached
    for job, made in _compile_all(missing, workers):
        done += 1
        if isinstance(made, Image):
            cache.put(job.key, made)
            images[job.key] = made
        elif refused is None:
            raise made
        else:
            refused[job.key] = made
        progress(done, len(by_key))
    return Compiled({key: images[key] for key in by_key if key in images}, cached)


def _compile_all(missing: Sequence[Job], workers: int) -> Iterator[tuple[Job, Image | CompileError]]:
    if not missing:
        return
    with tempfile.TemporaryDirectory(prefix="ouro-build-") as scratch:
        # Triton cannot be loaded twice in different modes, and threads do not help: processes, started afresh.
        pool = ProcessPoolExecutor(
            min(workers, len(missing)), mp_context=get_context("spawn"), initializer=_start_worker, initargs=(scratch,)
        )
        try:
            with _interrupts_held():
                waiting = {pool.submit(_compile, job): job for job in missing}
            for future in as_completed(waiting):
                yield waiting[future], _result(future)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started in the block never see an interrupt, not even before their first line; this one sees it later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _result(future: Future[Image | _Failure]) -> Image | CompileError:
    try:
        result = future.result()
    except BrokenProcessPool as error:
        raise CompileError(
            "a compiler process died", hint="If memory ran out, give --workers a smaller number; else run the build again."
        ) from error
    if isinstance(result, _Failure):
        return CompileError(result.what, where=result.where, hint=result.hint)
    return result


def _start_worker(scratch: str) -> None:
    """Make this process one whose compiles are reproducible, silent, and over when the build is."""
    threading.Thread(target=_end_with_parent, args=(scratch,), daemon=True).start()
    kept = clean_environment()
    os.environ.clear()
    private = tempfile.mkdtemp(dir=scratch)
    os.environ.update(kept, TRITON_HOME=private, TRITON_CACHE_DIR=private, TRITON_DISABLE_LINE_INFO="1")
    # Triton prints the whole PTX to stdout when ptxas fails, and its diagnostics go to stderr from C++.
    talk = os.open(Path(private) / "talk", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(talk, 2)


def _end_with_parent(scratch: str) -> None:
    """A build that is killed leaves no compilers running, and none of their files."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)


def _compile(job: Job) -> Image | _Failure:
    """Runs in a worker process."""
    os.ftruncate(2, 0)
    try:
        compiled = _triton_compile(job)
        return checked_image(job, compiled.asm["cubin"], compiled.asm["ptx"], compiled.metadata)
    except CompileError as error:
        return _Failure(error.what, error.where, error.hint)
    except Exception as error:  # Triton, MLIR and ptxas each raise types of their own
        refused = _refused(str(error))
        if job.entry is not None and refused:  # whoever gave it can change it; all else that compilers say is for a report
            refusal = entry_error(job.entry, job.arch, f"it does not compile: {refused}")
            return _Failure(refusal.what, refusal.where, refusal.hint)
        return _Failure(f"{type(error).__name__}: {_shortened(str(error))}{_talk()}", str(job))


def _refused(said: str) -> str:
    """What ptxas says is fatal, without where its file was; empty if it says nothing of the kind."""
    return next((found["why"] for line in said.splitlines() if (found := _FATAL.match(line.strip()))), "")


def _triton_compile(job: Job) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    s = job.specialization
    function = registry.source(s.kernel)
    types, constants = dict(s.types), dict(s.constants)
    stray = set(function.arg_names) ^ (types.keys() | constants.keys())
    if stray:
        raise ValueError(f"launch rule and source disagree on {sorted(stray)}")
    source = ASTSource(
        function,
        # A signature in another order than the kernel's parameters compiles silently to the wrong thing.
        {name: "constexpr" if name in constants else types[name] for name in function.arg_names},
        constexprs=constants,
        attrs={(function.arg_names.index(name),): [["tt.divisibility", 16]] for name in s.divisible},
    )
    compile_: Callable[..., Any] = triton.compile
    return compile_(source, target=GPUTarget("cuda", int(job.arch.removeprefix("sm_")), WARP), options=_options(s))


def _options(s: Specialization) -> dict[str, Any]:
    """Triton's options, with every default that a version or a variable could change spelt out."""
    return {
        "num_warps": s.options.num_warps,
        "num_stages": s.options.num_stages,
        "maxnreg": s.options.maxnreg or None,
        "launch_pdl": s.options.programmatic,
        "enable_fp_fusion": s.options.fusion,
        "default_dot_input_precision": "ieee",
        "debug": False,
    }


def checked_image(job: Job, cubin: bytes, ptx: str, metadata: Any) -> Image:
    """The record of a compiled kernel, after checking that it can be launched as plans launch it. Raises CompileError."""
    info = read_cubin(cubin, metadata.name)
    expected = [_TYPE_BYTES.get(kind, 8) for _, kind in job.specialization.types] + [8] * SCRATCH_ARGUMENTS
    if [size for _, size in info.parameters] != expected:
        raise CompileError(f"it takes parameters of {info.parameters} bytes, {expected} expected", where=str(job))
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise CompileError(f"it wants {metadata.global_scratch_size} bytes of global scratch", where=str(job))
    if metadata.num_ctas != 1 or metadata.num_warps != job.specialization.options.num_warps:
        raise CompileError(f"it has {metadata.num_warps} warps and clusters of {metadata.num_ctas}", where=str(job))
    _check_programmatic(job, ptx)
    return Image(
        cubin=cubin,
        function=metadata.name,
        registers=info.registers,
        spills=info.stack,
        shared=metadata.shared,
        parameters=info.parameters,
    )


def _check_programmatic(job: Job, ptx: str) -> None:
    """A kernel takes part in programmatic edges if its launch rule says so, and then keeps their rule; else not at all."""
    if not job.specialization.options.programmatic:
        if mentions(ptx):
            raise CompileError("it uses griddepcontrol and is not declared programmatic", where=str(job))
        return
    kernel = registry.kernel(job.specialization.kernel)
    pointers = {at: name for at, (name, kind) in enumerate(job.specialization.types) if kind.startswith("*")}
    weights, early = ({at for at, name in pointers.items() if name in of} for of in (kernel.weights, kernel.early))
    found = violations(ptx, weights, early, pointers.keys() - weights - early)
    if found:
        raise CompileError("it breaks the rule of programmatic dependencies: " + "; ".join(found[:3]), where=str(job))


def _talk() -> str:
    """The end of what the compilers wrote to stderr."""
    size = os.fstat(2).st_size
    said = os.pread(2, _KEPT_TALK, max(0, size - _KEPT_TALK)).decode(errors="replace").strip()
    return f"\n{said}" if said else ""


def _shortened(text: str) -> str:
    return text if len(text) <= _KEPT_TALK else f"{text[: _KEPT_TALK // 2]}\n…\n{text[-_KEPT_TALK // 2 :]}"
