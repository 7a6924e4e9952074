"""Attention of sparse rows, as the launches of a layer: the source loop captures, later loops consume."""

from __future__ import annotations

from collections.abc import Callable

from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer
from ouro_build.artifacts.retention import retained_counts
from ouro_build.artifacts.rows import RECORD
from ouro_build.builder.buffers import Buffers
from ouro_build.builder.record import Recorder
from ouro_build.kernels.attention_capture import attention_capture
from ouro_build.kernels.attention_decode import attention_decode, context_splits
from ouro_build.kernels.attention_merge import attention_merge
from ouro_build.kernels.attention_retained import attention_retained, retained_splits, tile_keys
from ouro_build.kernels.attention_select import attention_select
from ouro_build.kernels.retained_merge import retained_merge
from ouro_build.kernels.route_rows import route_rows

Attention = Callable[[Recorder, Buffer, Buffer, Buffer, int], None]
"""Records a layer's attention: (recorder, rows, q, out, layer)."""
NO_CAPTURE = "no_capture"
"""The variant of `mixed` for batches in which no row captures."""


class SparseAttention:
    """Records the attention of every mode for one part. Rows that all retain all of their keys are dense."""

    def __init__(self, model: ModelConfig, geometry: Geometry, part: Part, buffers: Buffers) -> None:
        self._model = model
        self._geometry = geometry
        self._part = part
        self._buffers = buffers

    def forms(self) -> tuple[tuple[str, str], ...]:
        """(mode, variant) of every form of `recurrent`."""
        modes = self._geometry.sparse_modes
        return (*((mode, "") for mode in modes), *((mode, NO_CAPTURE) for mode in modes if mode == "mixed"))

    def of(self, mode: str, variant: str) -> Attention:
        """What records the attention of one program of that form."""
        if mode == "dense" or not self._geometry.references:
            return self.dense
        uniform = {"capture": self.capture, "consume": self.consume}
        return uniform.get(mode) or self._mixed(captures=variant != NO_CAPTURE)

    def dense(self, recorder: Recorder, rows: Buffer, q: Buffer, out: Buffer, layer: int) -> None:
        """Attention of `rows` to all of their keys."""
        b, part = self._buffers, self._part
        partial, sums = self._context_splits(recorder, q, layer)
        recorder.add(
            attention_decode(part, rows=rows, q=q, block_tables=b.block_tables, kv=b.kv, partial=partial, sums=sums,
                             layer=layer, layers=self._model.layers)
        )  # fmt: skip
        recorder.add(attention_merge(part, rows=rows, partial=partial, sums=sums, out=out))

    def capture(self, recorder: Recorder, rows: Buffer, q: Buffer, out: Buffer, layer: int) -> None:
        """Attention of `rows` to all of their keys; their reference slots get what later loops need."""
        scores = self._select(recorder, rows, rows, q, out, layer)
        self._retained(recorder, rows, None, scores, None, layer)

    def consume(self, recorder: Recorder, rows: Buffer, q: Buffer, out: Buffer, layer: int) -> None:
        """The output that the reference slots of `rows` hold, corrected by this loop's attention to the retained keys."""
        self._retained(recorder, rows, q, None, out, layer)

    def _mixed(self, *, captures: bool) -> Attention:
        """Every row by its own mode, in one program."""
        lists: list[Buffer] = []

        def attention(recorder: Recorder, rows: Buffer, q: Buffer, out: Buffer, layer: int) -> None:
            if not lists:
                lists.extend(self._route(recorder, rows, captures=captures))
            dense_rows, capture_rows, sparse_rows = lists
            if captures:
                scores = self._select(recorder, dense_rows, capture_rows, q, out, layer)
                self._retained(recorder, sparse_rows, q, scores, out, layer)
            else:
                self.dense(recorder, dense_rows, q, out, layer)
                self._retained(recorder, sparse_rows, q, None, out, layer)

        return attention

    def _route(self, recorder: Recorder, rows: Buffer, *, captures: bool) -> list[Buffer]:
        names = ("dense_rows", "capture_rows", "sparse_rows")
        dense, capture, sparse = (recorder.workspace(name, "int32", rows.sizes[0], RECORD) for name in names)
        recorder.add(
            route_rows(self._part, rows=rows, dense_rows=dense, capture_rows=capture, sparse_rows=sparse, captures=captures)
        )
        return [dense, capture, sparse]

    def _context_splits(self, recorder: Recorder, q: Buffer, layer: int) -> tuple[Buffer, Buffer]:
        bucket, heads, head_dim = q.sizes
        splits = context_splits(self._part, bucket, self._model.kv_heads, self._geometry.max_context)
        return (
            recorder.workspace(f"partial.{layer}", "float32", bucket, heads, splits, head_dim),
            recorder.workspace(f"sums.{layer}", "float32", bucket, heads, splits, 2),
        )

    def _select(self, recorder: Recorder, rows: Buffer, chosen: Buffer, q: Buffer, out: Buffer, layer: int) -> Buffer:
        """Attention of `rows` to all keys, then for the `chosen` of them the selection; the rows' scores."""
        b, part, r = self._buffers, self._part, self._buffers.references
        if r is None:
            raise ValueError("captured without a reference pool")
        bucket, heads, _ = q.sizes
        partial, sums = self._context_splits(recorder, q, layer)
        scores = recorder.workspace(f"scores.{layer}", "float32", bucket, heads, self._geometry.max_context)
        recorder.add(
            attention_capture(part, rows=rows, q=q, block_tables=b.block_tables, kv=b.kv, partial=partial, sums=sums,
                              scores=scores, layer=layer, layers=self._model.layers)
        )  # fmt: skip
        recorder.add(attention_merge(part, rows=rows, partial=partial, sums=sums, out=out))
        recorder.add(
            attention_select(part, rows=chosen, scores=scores, sums=sums, out=out, retained_counts=r.retained_counts,
                             reference_records=r.records, reference_mass=r.mass, reference_keys=r.keys,
                             reference_output=r.output, layer=layer)
        )  # fmt: skip
        return scores

    def _retained(
        self, recorder: Recorder, rows: Buffer, q: Buffer | None, scores: Buffer | None, out: Buffer | None, layer: int
    ) -> None:
        """Attention of `rows` to their retained keys: with `scores` of those that capture, with `q` of those that consume."""
        m, b, part, r = self._model, self._buffers, self._part, self._buffers.references
        if r is None:
            raise ValueError("consumed without a reference pool")
        bucket = rows.sizes[0]
        most = int(retained_counts(self._geometry.max_context, self._geometry.key_retention)[-1])
        splits = retained_splits(part, bucket, m.heads, most, tile_keys(m.head_dim, m.dtype))
        partial = recorder.workspace(f"retained_partial.{layer}", "float32", bucket, m.heads, splits, m.head_dim)
        sums = recorder.workspace(f"retained_sums.{layer}", "float32", bucket, m.heads, splits, 2)
        recorder.add(
            attention_retained(part, rows=rows, q=q, block_tables=b.block_tables, kv=b.kv, scores=scores,
                               reference_records=r.records, reference_keys=r.keys, partial=partial, sums=sums, layer=layer)
        )  # fmt: skip
        recorder.add(
            retained_merge(part, rows=rows, partial=partial, sums=sums, reference_records=r.records, reference_keys=r.keys,
                           reference_mass=r.mass, reference_output=r.output, reference_contribution=r.contribution, out=out,
                           layer=layer, captures=scores is not None)
        )  # fmt: skip
