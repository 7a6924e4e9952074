"""Plans without kernels: launches that say only what they read and write."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.plan import Argument, Buffer, Edge, Launch, Options, Plan, Pool, ProgramKey, Specialization
from ouro_build.builder.buffers import Buffers
from ouro_build.kernels.spec import Kernel, Tolerance

MODEL = ModelConfig(
    vocab_size=100, hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1, head_dim=16, loops=2,
    max_position=64, rms_norm_eps=(1e-6).hex(), rope_theta=(1e4).hex(), tied_embeddings=False, dtype="float32",
)  # fmt: skip
GEOMETRY = Geometry(buckets=(1, 3), prefill_buckets=(4,), max_context=64, max_requests=3, block_size=16)


def kernel(name: str) -> Kernel:
    """The kernels of `launch`: they write `out0`, `out1`, … and touch all of their buffers, after they have waited."""
    written = tuple(f"out{i}" for i in range(int(name)))
    return Kernel(name, contract=1, writes=written, tolerance=Tolerance({}, {}, "they compute nothing"))


def work(name: str, size: int) -> Buffer:
    """A float32 workspace buffer."""
    return Buffer(name, Pool.WORKSPACE, "float32", (size,))


def launch(
    written: Sequence[Buffer],
    read: Sequence[Buffer] = (),
    after: Sequence[int] | None = None,
    grid: tuple[int, int, int] = (1, 1, 1),
    layer: Argument | None = None,
) -> Launch:
    """A launch of the kernel named by how many buffers it writes. `after` None: `plan` makes it wait for the one before."""
    layers = () if layer is None else (layer,)
    names = [f"out{i}" for i in range(len(written))] + [f"in{i}" for i in range(len(read))]
    specialization = Specialization(
        kernel=str(len(written)),
        contract=1,
        types=(*((name, "*fp32") for name in names), *(("layer", "i32") for _ in layers)),
        constants=(),
        divisible=(),
        options=Options(num_warps=1, num_stages=1),
    )
    edges = ((-1, Edge.FULL),) if after is None else tuple((i, Edge.FULL) for i in after)
    return Launch(specialization=specialization, grid=grid, arguments=(*written, *read, *layers), after=edges)


def plan(*launches: Launch, bucket: int = 1) -> Plan:
    """A plan of `launches`."""
    return Plan(ProgramKey("recurrent", bucket), tuple(_chained(x, i) for i, x in enumerate(launches)))


def _chained(x: Launch, at: int) -> Launch:
    edges = tuple((at - 1 if i < 0 else i, edge) for i, edge in x.after if i >= 0 or at)
    return Launch(specialization=x.specialization, grid=x.grid, arguments=x.arguments, after=edges)


@st.composite
def random_plans(draw: st.DrawFn, buffers: Buffers) -> tuple[Plan, ...]:
    """Up to three correct plans: forks and joins, workspace written before it is read, state touched in order."""
    return tuple(draw(random_plan(buffers, bucket)) for bucket in range(1, draw(st.integers(1, 3)) + 1))


@st.composite
def random_plan(draw: st.DrawFn, buffers: Buffers, bucket: int) -> Plan:
    """Each launch writes one or two new buffers, or one it has read, and reads what its predecessors wrote."""
    launches: list[Launch] = []
    earlier: list[set[int]] = []
    written: list[tuple[int, Buffer]] = []
    for at in range(draw(st.integers(1, 12))):
        after = draw(st.lists(st.integers(0, at - 1), max_size=3, unique=True)) if at else []
        before = set(after).union(*(earlier[i] for i in after))
        earlier.append(before)
        visible = [b for i, b in written if i in before]
        read = draw(st.lists(st.sampled_from(visible), max_size=3, unique=True)) if visible else []
        fresh = [work(f"{bucket}/{at}.{i}", draw(st.integers(1, 600))) for i in range(draw(st.integers(1, 2)))]
        written += [(at, b) for b in fresh]
        state = [buffers.hidden] if len(before) == at else []
        launches.append(launch([*fresh, *state], [*read, buffers.weights["w"]], after))
    return Plan(ProgramKey("recurrent", bucket), tuple(launches))
