"""Feed: files of text in, batches of token windows out; the position is exact and nothing grows with the corpus."""
