"""The model's geometry, as far as programs, plans and weights depend on it."""

from __future__ import annotations

import msgspec

from ouro_build.artifacts.dtypes import DTYPES


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A looped decoder: `layers` layers run `loops` times with the same weights.

    Floats are kept as C hexadecimal strings (`float.hex`), so that their JSON form is exact.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    loops: int
    max_position: int
    rms_norm_eps: str
    rope_theta: str
    tied_embeddings: bool
    dtype: str

    @property
    def eps(self) -> float:
        """Epsilon of every RMSNorm."""
        return float.fromhex(self.rms_norm_eps)

    @property
    def theta(self) -> float:
        """Base of the rotary frequencies."""
        return float.fromhex(self.rope_theta)

    @property
    def planes(self) -> int:
        """KV planes: one a (loop, layer); plane = loop * layers + layer."""
        return self.loops * self.layers

    @property
    def query_size(self) -> int:
        """Elements of all query heads of a row."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads of a row; as many again are its values."""
        return self.kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Rows of the fused query, key and value projection."""
        return self.query_size + 2 * self.kv_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token occupies in the KV pool, all planes together."""
        return 2 * self.planes * self.kv_size * DTYPES[self.dtype].bytes
