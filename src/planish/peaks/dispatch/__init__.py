"""Tokens and their experts in, expert outputs back; nothing grows with the routing."""
