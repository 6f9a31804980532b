"""Show: a run folder in, one page of figures out; no torch."""
