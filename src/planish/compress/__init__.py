"""Shrink: a trained model and a serving target in, a smaller model that meets it out."""
