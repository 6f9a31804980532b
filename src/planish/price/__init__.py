"""Weigh: what each method costs in bytes and seconds, one file per peak, as arithmetic without torch."""
