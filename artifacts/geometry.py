"""What a build declares: shapes, contexts and depths that its programs serve."""

from __future__ import annotations

import msgspec

from ouro_build.artifacts.model import ModelConfig


class Geometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Declared shapes. `buckets` are row counts of decode programs, `prefill_buckets` of prompt chunks, both ascending."""

    buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    max_context: int
    max_requests: int
    block_size: int

    @property
    def table_width(self) -> int:
        """KV blocks that one request can have."""
        return -(-self.max_context // self.block_size)

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch of any program."""
        return max(self.buckets + self.prefill_buckets)

    @property
    def decode_slots(self) -> int:
        """State slots for rows that outlive a step. The first `max_requests` belong to the requests of the same index."""
        return max(self.max_requests, self.buckets[-1])

    @property
    def slots(self) -> int:
        """State slots in all: the rows that decode, then those of one prompt chunk."""
        return self.decode_slots + max(self.prefill_buckets, default=0)

    def block_bytes(self, model: ModelConfig) -> int:
        """Bytes of one KV block, all planes together."""
        return model.kv_bytes_per_token * self.block_size
