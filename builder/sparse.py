"""Attention of sparse rows, as the launches of a layer: the source loop captures, later loops consume."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Launch
from ouro_build.artifacts.retention import retained_counts
from ouro_build.artifacts.rows import RECORD
from ouro_build.builder.buffers import Buffers, References
from ouro_build.builder.record import Recorder
from ouro_build.kernels.attention_capture import attention_capture
from ouro_build.kernels.attention_decode import attention_decode, split_rule
from ouro_build.kernels.attention_merge import attention_merge
from ouro_build.kernels.attention_retained import attention_retained, retained_splits, tile_keys
from ouro_build.kernels.attention_select import attention_select
from ouro_build.kernels.retained_merge import retained_merge
from ouro_build.kernels.route_rows import route_rows
from ouro_build.kernels.split_contexts import SplitRule, split_contexts

Attention = Callable[[Buffer, int], Buffer]
"""Records a layer's attention: queries, layer; where its output is."""
LoopAttention = Callable[[Recorder, Buffer], Attention]
"""Records what the rows of a loop need once; what a layer adds."""
NO_CAPTURE = "no_capture"
"""The variant of `mixed` for batches in which no row captures."""


class _Contexts(NamedTuple):
    """Rows' contexts as `split_contexts` cuts them: no row has more than `most` splits."""

    splits: Buffer
    counts: Buffer
    rule: SplitRule
    most: int


class _Scored(NamedTuple):
    """Attention that keeps its scores, and what it leaves."""

    launch: Launch
    partial: Buffer
    sums: Buffer
    scores: Buffer


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

    def of(self, mode: str, variant: str) -> LoopAttention:
        """What records the attention of one program of that form."""
        if mode == "dense" or not self._geometry.references:
            return self.dense
        uniform = {"capture": self.capture, "consume": self.consume}
        return uniform.get(mode) or (self._mixed_without_capture if variant == NO_CAPTURE else self._mixed)

    def dense(self, recorder: Recorder, rows: Buffer) -> Attention:
        """Attention of `rows` to all of their keys."""
        return self._dense(recorder, rows, rows)

    def _dense(self, recorder: Recorder, rows: Buffer, batch: Buffer) -> Attention:
        """The same for `rows` that are some of `batch`."""
        b, part = self._buffers, self._part
        contexts = self._cut(recorder, rows, batch)
        out = self._attended(recorder, rows)

        def attend(q: Buffer, layer: int) -> Buffer:
            partial, sums = self._partial(recorder, contexts, q, layer)
            recorder.add(
                attention_decode(part, splits=contexts.splits, q=q, block_tables=b.block_tables, kv=b.kv, partial=partial,
                                 sums=sums, layer=layer, layers=self._model.layers, rule=contexts.rule)
            )  # fmt: skip
            recorder.add(attention_merge(part, counts=contexts.counts, partial=partial, sums=sums, out=out))
            return out

        return attend

    def capture(self, recorder: Recorder, rows: Buffer) -> Attention:
        """Attention of `rows` to all of their keys; their reference slots get what later loops need.

        No layer of this loop needs that, so it is made beside the layers that follow. It stays at most two behind, so that two
        layers' scores are all that the workspace has to hold.
        """
        contexts = self._cut(recorder, rows, rows)
        remembered: list[int] = []

        def attend(q: Buffer, layer: int) -> Buffer:
            out = self._attended(recorder, rows, layer)
            scored = self._scored(recorder, contexts, q, layer)
            captured = recorder.add(scored.launch, joins=remembered[-2:-1])
            merged = recorder.add(self._merge(contexts, scored, out))
            selected = recorder.beside(self._select(contexts, rows, scored, layer), after=captured, joins=remembered[-1:])
            retained, merge = self._retained(recorder, rows, None, scored.scores, out, layer)
            # Started early, it would hold multiprocessors, which the next layers could use, for as long as the selection takes.
            contribution = recorder.beside(retained, joins=[selected])
            remembered.append(recorder.beside(merge, after=contribution, joins=[merged]))
            return out

        return attend

    def consume(self, recorder: Recorder, rows: Buffer) -> Attention:
        """The output that the reference slots of `rows` hold, corrected by this loop's attention to the retained keys."""
        out = self._attended(recorder, rows)

        def attend(q: Buffer, layer: int) -> Buffer:
            for launch in self._retained(recorder, rows, q, None, out, layer):
                recorder.add(launch)
            return out

        return attend

    def _mixed(self, recorder: Recorder, rows: Buffer) -> Attention:
        """Every row by its own mode, in one program."""
        dense_rows, capture_rows, sparse_rows = self._route(recorder, rows, captures=True)
        contexts = self._cut(recorder, dense_rows, rows)
        out = self._attended(recorder, sparse_rows)

        def attend(q: Buffer, layer: int) -> Buffer:
            scored = self._scored(recorder, contexts, q, layer)
            selection = self._select(contexts, capture_rows, scored, layer)
            retained, merge = self._retained(recorder, sparse_rows, q, scored.scores, out, layer)
            for launch in (scored.launch, self._merge(contexts, scored, out), selection):
                recorder.add(launch)
            # It reads before it waits what was selected.
            recorder.add(retained, joins=[recorder.end])
            recorder.add(merge)
            return out

        return attend

    def _mixed_without_capture(self, recorder: Recorder, rows: Buffer) -> Attention:
        dense_rows, _, sparse_rows = self._route(recorder, rows, captures=False)
        dense = self._dense(recorder, dense_rows, rows)

        def attend(q: Buffer, layer: int) -> Buffer:
            out = dense(q, layer)
            for launch in self._retained(recorder, sparse_rows, q, None, out, layer):
                recorder.add(launch)
            return out

        return attend

    def _route(self, recorder: Recorder, rows: Buffer, *, captures: bool) -> tuple[Buffer, Buffer, Buffer]:
        names = ("dense_rows", "capture_rows", "sparse_rows")
        dense, capture, sparse = (recorder.workspace(name, "int32", rows.sizes[0], RECORD) for name in names)
        recorder.add(
            route_rows(self._part, rows=rows, dense_rows=dense, capture_rows=capture, sparse_rows=sparse, captures=captures)
        )
        return dense, capture, sparse

    def _cut(self, recorder: Recorder, rows: Buffer, batch: Buffer) -> _Contexts:
        """Cut the contexts of `rows`, some or all of `batch`, for every layer of the loop."""
        m, bucket = self._model, rows.sizes[0]
        rule = split_rule(self._part, bucket, m.heads, m.kv_heads, m.head_dim, m.dtype)
        most = rule.most(self._geometry.max_context)
        splits = recorder.workspace("splits", "int32", bucket * most, rule.record)
        counts = recorder.workspace("counts", "int32", bucket)
        recorder.beside(
            split_contexts(self._part, rows=rows, batch=batch, block_tables=self._buffers.block_tables, splits=splits,
                           counts=counts, rule=rule, block_size=self._geometry.block_size),
            after=recorder.end,
        )  # fmt: skip
        return _Contexts(splits, counts, rule, most)

    def _attended(self, recorder: Recorder, rows: Buffer, layer: int | None = None) -> Buffer:
        """The output of a layer's attention, of every layer's if none is named."""
        name = "attended" if layer is None else f"attended.{layer}"
        return recorder.workspace(name, self._model.dtype, rows.sizes[0], self._model.query_size)

    def _partial(self, recorder: Recorder, contexts: _Contexts, q: Buffer, layer: int) -> tuple[Buffer, Buffer]:
        bucket, heads, head_dim = q.sizes
        return (
            recorder.workspace(f"partial.{layer}", "float32", bucket, heads, contexts.most, head_dim),
            recorder.workspace(f"sums.{layer}", "float32", bucket, heads, contexts.most, 2),
        )

    def _scored(self, recorder: Recorder, contexts: _Contexts, q: Buffer, layer: int) -> _Scored:
        """Attention to all keys of `contexts` that keeps its scores."""
        b = self._buffers
        bucket, heads, _ = q.sizes
        partial, sums = self._partial(recorder, contexts, q, layer)
        scores = recorder.workspace(f"scores.{layer}", "float32", bucket, heads, self._geometry.max_context)
        launch = attention_capture(
            self._part, splits=contexts.splits, q=q, block_tables=b.block_tables, kv=b.kv, partial=partial, sums=sums,
            scores=scores, layer=layer, layers=self._model.layers, rule=contexts.rule,
        )  # fmt: skip
        return _Scored(launch, partial, sums, scores)

    def _merge(self, contexts: _Contexts, scored: _Scored, out: Buffer) -> Launch:
        return attention_merge(self._part, counts=contexts.counts, partial=scored.partial, sums=scored.sums, out=out)

    def _select(self, contexts: _Contexts, chosen: Buffer, scored: _Scored, layer: int) -> Launch:
        """The selection for the `chosen` rows of `contexts`."""
        r = self._references()
        return attention_select(
            self._part, rows=chosen, counts=contexts.counts, scores=scored.scores, sums=scored.sums,
            retained_counts=r.retained_counts, reference_records=r.records, reference_mass=r.mass, reference_keys=r.keys,
            layer=layer,
        )  # fmt: skip

    def _retained(
        self, recorder: Recorder, rows: Buffer, q: Buffer | None, scores: Buffer | None, out: Buffer, layer: int
    ) -> tuple[Launch, Launch]:
        """Attention of `rows` to their retained keys, and what is made of it: with `scores` of those that capture, with `q` of
        those that consume."""
        m, b, part, r = self._model, self._buffers, self._part, self._references()
        bucket = rows.sizes[0]
        most = int(retained_counts(self._geometry.max_context, self._geometry.key_retention)[-1])
        splits = retained_splits(part, bucket, m.heads, most, tile_keys(m.head_dim, m.dtype))
        partial = recorder.workspace(f"retained_partial.{layer}", "float32", bucket, m.heads, splits, m.head_dim)
        sums = recorder.workspace(f"retained_sums.{layer}", "float32", bucket, m.heads, splits, 2)
        retained = attention_retained(
            part, rows=rows, q=q, block_tables=b.block_tables, kv=b.kv, scores=scores, reference_records=r.records,
            reference_keys=r.keys, partial=partial, sums=sums, layer=layer,
        )  # fmt: skip
        merge = retained_merge(
            part, rows=rows, partial=partial, sums=sums, reference_records=r.records, reference_keys=r.keys,
            reference_mass=r.mass, reference_output=r.output, reference_contribution=r.contribution,
            attended=None if scores is None else out, out=None if q is None else out, layer=layer,
        )  # fmt: skip
        return retained, merge

    def _references(self) -> References:
        if self._buffers.references is None:
            raise ValueError("captured or consumed without a reference pool")
        return self._buffers.references
