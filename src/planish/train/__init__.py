"""Run: a run file in, a trained checkpoint out, every byte accounted for."""
