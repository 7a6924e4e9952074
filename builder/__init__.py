"""Turns a checkpoint and a list of shapes into an artifact."""
