"""Compute: one file per kernel, the torch twin first; no autograd and no ranks in here."""
