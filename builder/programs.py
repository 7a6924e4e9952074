"""The programs: what each launches, for one part and one bucket."""

from __future__ import annotations

from collections.abc import Callable

from ouro_build.artifacts.geometry import Geometry
from ouro_build.artifacts.model import ModelConfig
from ouro_build.artifacts.parts import Part
from ouro_build.artifacts.plan import Buffer, Plan, ProgramKey
from ouro_build.artifacts.rows import RECORD
from ouro_build.builder.buffers import Buffers
from ouro_build.builder.record import Recorder, covers, takes_residency
from ouro_build.builder.sparse import Attention, LoopAttention, SparseAttention
from ouro_build.kernels.advance import advance
from ouro_build.kernels.argmax import argmax
from ouro_build.kernels.attention_prefill import attention_prefill
from ouro_build.kernels.bind import bind
from ouro_build.kernels.embedding import embedding
from ouro_build.kernels.exit_gate import exit_gate
from ouro_build.kernels.kv_copy import kv_copy
from ouro_build.kernels.linear import fused, linear
from ouro_build.kernels.linear_rope import linear_rope
from ouro_build.kernels.linear_silu import linear_silu
from ouro_build.kernels.locate import locate
from ouro_build.kernels.read_pool import read_pool
from ouro_build.kernels.residual_norm import residual_norm
from ouro_build.kernels.resolve import resolve
from ouro_build.kernels.rms_norm import rms_norm
from ouro_build.kernels.rope_kv_write import rope_kv_write
from ouro_build.kernels.silu_mul import silu_mul
from ouro_build.kernels.sites import bits_of, site_of
from ouro_build.kernels.tuning import NO_RESIDENCY, Residencies, tuning_of


class Programs:
    """Records every program of `model` for one part."""

    def __init__(self, model: ModelConfig, geometry: Geometry, part: Part, buffers: Buffers) -> None:
        self._model = model
        self._geometry = geometry
        self._part = part
        self._buffers = buffers
        self._attention = SparseAttention(model, geometry, part, buffers)
        self._residency: dict[int, Residencies] = {}

    def record(self) -> tuple[Plan, ...]:
        """A plan for every declared (program, bucket, mode)."""
        decode: dict[str, Callable[[int], Plan]] = {
            "coda": self.coda,
            "sample": self.sample,
            "advance": self.advance,
            "kv_copy": self.kv_copy,
        }
        rows = sorted({*self._geometry.buckets, *self._geometry.prefill_buckets})
        plans = [self.prelude(bucket) for bucket in rows]
        plans += [self.prefill(bucket) for bucket in self._geometry.prefill_buckets]
        plans += [self.recurrent(bucket, *form) for form in self._attention.forms() for bucket in self._geometry.buckets]
        plans += [make(bucket) for make in decode.values() for bucket in self._geometry.buckets]
        return (*plans, self.read())

    def prelude(self, bucket: int) -> Plan:
        """Apply the host's row inputs, start the rows at loop 0, embed their tokens."""
        b, part = self._buffers, self._part
        recorder = self._recorder(ProgramKey("prelude", bucket))
        recorder.add(
            bind(part, bucket=bucket, inputs=b.inputs, row_state=b.row_state, block_tables=b.block_tables,
                 block_size=self._geometry.block_size)
        )  # fmt: skip
        rows = self._resolve(recorder, bucket, b.batch, self._model.loops)
        recorder.add(embedding(part, rows=rows, weight=b.weight("embedding"), hidden=b.hidden))
        return recorder.plan()

    def recurrent(self, bucket: int, mode: str = "dense", variant: str = "") -> Plan:
        """One loop over rows of any loop, one query a row."""
        recorder = self._recorder(ProgramKey("recurrent", bucket, mode, variant))
        return self._loop(recorder, bucket, self._attention.of(mode, variant))

    def prefill(self, bucket: int) -> Plan:
        """One loop over prompt rows; a request's rows are adjacent and ascending."""
        return self._loop(self._recorder(ProgramKey("prefill", bucket)), bucket, self._prefill_attention)

    def coda(self, bucket: int) -> Plan:
        """LM head over the rows of the coda batch."""
        b = self._buffers
        recorder = self._recorder(ProgramKey("coda", bucket))
        rows = self._coda_rows(recorder, bucket)
        recorder.add(linear(self._part, rows=rows, x=b.hidden, weight=b.weight("lm_head"), out=b.logits, gather=True))
        return recorder.plan()

    def sample(self, bucket: int) -> Plan:
        """Greedy choice from the logits of the coda batch."""
        b = self._buffers
        recorder = self._recorder(ProgramKey("sample", bucket))
        rows = self._coda_rows(recorder, bucket)
        recorder.add(argmax(self._part, rows=rows, logits=b.logits, tokens=b.tokens))
        return recorder.plan()

    def advance(self, bucket: int) -> Plan:
        """Make the sampled tokens the rows' next inputs."""
        b = self._buffers
        recorder = self._recorder(ProgramKey("advance", bucket))
        rows = self._coda_rows(recorder, bucket)
        recorder.add(advance(self._part, rows=rows, tokens=b.tokens, row_state=b.row_state))
        return recorder.plan()

    def kv_copy(self, bucket: int) -> Plan:
        """Copy the rows' keys and values of the last loop that ran to the planes of the loops that were skipped."""
        b = self._buffers
        recorder = self._recorder(ProgramKey("kv_copy", bucket))
        rows = self._coda_rows(recorder, bucket)
        recorder.add(
            kv_copy(self._part, rows=rows, block_tables=b.block_tables, kv=b.kv,
                    layers=self._model.layers, loops=self._model.loops)
        )  # fmt: skip
        return recorder.plan()

    def read(self) -> Plan:
        """Read the weights pool once: how fast this can be is what a step's speed is held against."""
        b = self._buffers
        recorder = self._recorder(ProgramKey("read", 1))
        recorder.add(read_pool(self._part, pool=b.weights_pool, sums=b.read_sums))
        return recorder.plan()

    def residency(self, bucket: int) -> Residencies:
        """What tables ask for dense decode steps of `bucket` rows: for every launch of their loops, or for none."""
        if bucket not in self._residency:
            launches = self._loop(Recorder(ProgramKey("recurrent", bucket)), bucket, self._attention.dense).launches
            sites = [site for launch in launches if (site := site_of(launch)) is not None]
            asked = tuning_of(self._part).residency(self._part.arch, bits_of(self._model.dtype), bucket, sites)
            self._residency[bucket] = asked if covers(asked, launches) else NO_RESIDENCY
        return self._residency[bucket]

    def _recorder(self, key: ProgramKey) -> Recorder:
        return Recorder(key, self.residency(key.bucket)) if takes_residency(key) else Recorder(key)

    def _resolve(self, recorder: Recorder, bucket: int, batch: Buffer, loop_limit: int) -> Buffer:
        """Row records of `batch`; rows whose loop is `loop_limit` or more, or past the context, are inactive in the program."""
        rows = recorder.workspace("rows", "int32", bucket, RECORD)
        recorder.add(
            resolve(self._part, batch=batch, row_state=self._buffers.row_state, rows=rows, loop_limit=loop_limit,
                    position_limit=self._geometry.max_context)
        )  # fmt: skip
        return rows

    def _coda_rows(self, recorder: Recorder, bucket: int) -> Buffer:
        return self._resolve(recorder, bucket, self._buffers.coda_batch, self._model.loops + 1)

    def _loop(self, recorder: Recorder, bucket: int, attention: LoopAttention) -> Plan:
        m, b, part, eps = self._model, self._buffers, self._part, self._model.eps

        def workspace(name: str, *shape: int) -> Buffer:
            return recorder.workspace(name, m.dtype, bucket, *shape)

        rows = self._resolve(recorder, bucket, b.batch, m.loops)
        cache_place = self._locate(recorder, rows)
        attend = attention(recorder, rows)
        prepared = recorder.open_ends() or (recorder.end,)
        # The residual stream lives in rows here, so that no layer has to find a row's slot before it can read.
        residual, x = workspace("residual", m.hidden_size), workspace("x", m.hidden_size)
        q = workspace("q", m.heads, m.head_dim)
        gated = workspace("gated", m.intermediate_size)
        update = workspace("update", m.hidden_size)

        def dense(name: str, layer: int, source: Buffer, out: Buffer) -> None:
            recorder.add(linear(part, rows=rows, x=source, weight=b.weight(name, layer), out=out))

        def add_and_norm(update_norm: Buffer, norm: Buffer) -> None:
            recorder.add(
                residual_norm(part, rows=rows, update=update, update_weight=update_norm, residual=residual,
                              weight=norm, out=x, eps=eps)
            )  # fmt: skip

        recorder.add(
            rms_norm(part, rows=rows, hidden=b.hidden, weight=b.weight("input_norm", 0), residual=residual, out=x, eps=eps)
        )
        for layer in range(m.layers):
            self._project(recorder, rows, cache_place, x, q, layer)
            if layer == 0:
                # From here on, kernels read before they wait what was found out about the rows.
                recorder.join(prepared)
            dense("o", layer, attend(q, layer), update)
            add_and_norm(b.weight("input_norm_2", layer), b.weight("post_norm", layer))
            self._gated(recorder, rows, x, gated, layer)
            dense("down", layer, gated, update)
            last = layer == m.layers - 1
            add_and_norm(b.weight("post_norm_2", layer), b.weight("norm") if last else b.weight("input_norm", layer + 1))
        # One launch ends the loop: what runs next follows it alone, and may start early.
        recorder.add(
            exit_gate(part, rows=rows, x=x, weight=b.weight("gate"), bias=b.weight("gate_bias"), hidden=b.hidden,
                      row_state=b.row_state, gate_logits=b.gate_logits, exit_probability=b.exit_probability),
            joins=recorder.open_ends(),
        )  # fmt: skip
        return recorder.plan()

    def _locate(self, recorder: Recorder, rows: Buffer) -> tuple[Buffer, Buffer]:
        """Rows' KV blocks and rotations, for every layer of the loop."""
        b, bucket = self._buffers, rows.sizes[0]
        blocks = recorder.workspace("blocks", "int32", bucket)
        rotation = recorder.workspace("rotation", "float32", bucket, 2, self._model.head_dim // 2)
        recorder.add(
            locate(self._part, rows=rows, inv_freq=b.weight("inv_freq"), block_tables=b.block_tables, blocks=blocks,
                   rotation=rotation, block_size=self._geometry.block_size)
        )  # fmt: skip
        return blocks, rotation

    def _project(
        self, recorder: Recorder, rows: Buffer, place: tuple[Buffer, Buffer], x: Buffer, q: Buffer, layer: int
    ) -> None:
        """Projection to queries, keys and values, rotation, cache write: one kernel, as in `_gated`."""
        m, b, part = self._model, self._buffers, self._part
        weight, bucket = b.weight("qkv", layer), rows.sizes[0]
        blocks, rotation = place
        if fused(bucket, m.dtype):
            recorder.add(
                linear_rope(part, rows=rows, x=x, weight=weight, blocks=blocks, rotation=rotation, kv=b.kv, q=q,
                            layer=layer, layers=m.layers)
            )  # fmt: skip
            return
        qkv = recorder.workspace(f"qkv.{layer}", m.dtype, bucket, m.qkv_size)
        recorder.add(linear(part, rows=rows, x=x, weight=weight, out=qkv))
        recorder.add(
            rope_kv_write(part, rows=rows, blocks=blocks, rotation=rotation, qkv=qkv, kv=b.kv, q=q, layer=layer,
                          layers=m.layers)
        )  # fmt: skip

    def _gated(self, recorder: Recorder, rows: Buffer, x: Buffer, out: Buffer, layer: int) -> None:
        """Gate and up projection and their gated product: one kernel where few rows leave it bound by the weights."""
        m, part, weight = self._model, self._part, self._buffers.weight("gate_up", layer)
        bucket = rows.sizes[0]
        if fused(bucket, m.dtype):
            recorder.add(linear_silu(part, rows=rows, x=x, weight=weight, out=out))
            return
        gate_up = recorder.workspace(f"gate_up.{layer}", m.dtype, bucket, 2 * m.intermediate_size)
        recorder.add(linear(part, rows=rows, x=x, weight=weight, out=gate_up))
        recorder.add(silu_mul(part, rows=rows, gate_up=gate_up, out=out))

    def _prefill_attention(self, recorder: Recorder, rows: Buffer) -> Attention:
        m, b, part = self._model, self._buffers, self._part
        out = recorder.workspace("attended", m.dtype, rows.sizes[0], m.query_size)

        def attend(q: Buffer, layer: int) -> Buffer:
            recorder.add(
                attention_prefill(part, rows=rows, q=q, block_tables=b.block_tables, kv=b.kv, out=out, layer=layer,
                                  layers=m.layers)
            )  # fmt: skip
            return out

        return attend
