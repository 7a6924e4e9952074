"""Triton kernels, each beside the torch reference that defines its result and its launch rule."""
