"""Say: one file per verb; arguments in, one clear answer and an exit code out."""
