"""Feed-forward activations in, the same values back in backward; the stored bytes shrink to what is not zero."""
