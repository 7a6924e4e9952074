"""How large files are digested. Imports nothing: a worker begins to hash before it imports the rest."""

from __future__ import annotations

WEIGHTS = "weights.safetensors"
"""The artifact's own weights."""
CHUNK = 16 << 20
"""Bytes that one chunk digest covers."""
CHUNKED_ABOVE = 64 << 20
"""Files of more bytes than this have chunk digests."""
