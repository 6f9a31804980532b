"""Move: process groups, rings and exchanges; blocks in, the same blocks out on other ranks, staging of fixed size."""
