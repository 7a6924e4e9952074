"""Sums over an axis that warps share."""
