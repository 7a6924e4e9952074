"""What the recorder makes of launches: edges, and what they ask of a multiprocessor's memory."""

from __future__ import annotations

from ouro_build.artifacts.parts import find_part
from ouro_build.artifacts.plan import Edge, Launch, Options, ProgramKey
from ouro_build.artifacts.tuning import Residency
from ouro_build.builder.record import Recorder
from ouro_build.kernels.linear import linear
from ouro_build.kernels.spec import Kernel, Tolerance
from tests.kernel_harness import buffer, matrix_buffer

KERNEL = Kernel("noted", 1, (), Tolerance({}, {}, "nothing is written"))
KEY = ProgramKey("recurrent", 1)


def launch(carveout: int = -1, arch: str = "sm_90") -> Launch:
    options = Options(num_warps=1, num_stages=1, carveout=carveout)
    return KERNEL.launch(find_part(arch), grid=(1, 1, 1), arguments={}, constants={}, options=options)


def carveouts(*asked: int) -> list[int]:
    recorder = Recorder(KEY)
    for carveout in asked:
        recorder.add(launch(carveout))
    return [made.specialization.options.carveout for made in recorder.plan().launches]


def test_a_carveout_that_some_launches_agree_on_is_given_to_all() -> None:
    assert carveouts(-1, 75, -1, 75) == [75, 75, 75, 75]
    assert carveouts(-1, 0, -1) == [0, 0, 0]


def test_without_one_or_with_several_launches_keep_their_own() -> None:
    assert carveouts(-1, -1) == [-1, -1]
    assert carveouts(75, -1, 50) == [75, -1, 50]


def test_what_tables_ask_for_is_given_to_launches_of_the_kernel_instead() -> None:
    """To all or to none."""
    for listed, expected in (("noted", [(60, 4096)] * 2), ("other", [(75, 0), (75, 0)])):
        asked = Residency(kernel=listed, bits=16, rows=1, carveout=60, shared=4096)
        recorder = Recorder(KEY, {(listed, ""): asked})
        for carveout in (75, -1):
            recorder.add(launch(carveout))
        options = [made.specialization.options for made in recorder.plan().launches]
        assert [(o.carveout, o.shared) for o in options] == expected


def test_matrices_of_a_kernel_are_told_apart_by_their_kind() -> None:
    asked = [Residency(kernel="linear_few", bits=16, rows=1, kind=kind, shared=n) for n, kind in enumerate(("narrow", "deep"))]
    recorder = Recorder(KEY, {(r.kernel, r.kind): r for r in asked})
    for size, width in ((2048, 2048), (2048, 5632)):
        recorder.add(
            linear(
                find_part("h200"),
                rows=buffer("rows", "int32", 1, 8),
                x=buffer("x", "bfloat16", 1, width),
                weight=matrix_buffer("weight", "bfloat16", size, width),
                out=buffer("out", "bfloat16", 1, size),
            )
        )
    assert [made.specialization.options.shared for made in recorder.plan().launches] == [0, 1]


def test_the_next_of_the_chain_starts_when_a_joined_launch_has_ended() -> None:
    recorder = Recorder(KEY)
    first = recorder.add(launch())
    beside = recorder.beside(launch(), after=first)
    recorder.add(launch())
    recorder.join(recorder.open_ends())
    recorder.add(launch())
    recorder.add(launch())
    after = [dict(made.after) for made in recorder.plan().launches]
    assert after == [
        {},
        {first: Edge.PROGRAMMATIC},
        {first: Edge.PROGRAMMATIC},
        {2: Edge.PROGRAMMATIC, beside: Edge.FULL},
        {3: Edge.PROGRAMMATIC},
    ]


def test_a_launch_that_is_joined_and_comes_before_in_the_chain_is_followed_once() -> None:
    recorder = Recorder(KEY)
    recorder.add(launch())
    recorder.add(launch(), joins=[recorder.end])
    assert [made.after for made in recorder.plan().launches] == [(), ((0, Edge.FULL),)]
