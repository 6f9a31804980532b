"""Hidden states and targets in, per-token loss out; nothing grows with tokens x vocabulary."""
