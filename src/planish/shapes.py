"""Sizes as pure data: what a price needs to know about a model and a batch."""
