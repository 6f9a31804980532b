"""Query, key and value in, attention out; nothing grows with the square of the sequence."""
