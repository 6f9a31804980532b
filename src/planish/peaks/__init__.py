"""Bound: one room per memory peak; what would grow goes in, the same mathematics comes out in blocks of fixed size."""
