"""Adapt: where a transformers model keeps its layers and head, and how planish's parts are put in their place."""
