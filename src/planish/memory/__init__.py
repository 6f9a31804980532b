"""Measure: which bytes are alive, when, for whom, and whether they stay inside the budget."""
