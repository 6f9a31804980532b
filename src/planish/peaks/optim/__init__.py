"""Gradients in, updated parameters out; optimizer state stays inside the bytes it was given at launch."""
