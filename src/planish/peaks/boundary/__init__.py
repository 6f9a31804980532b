"""Layer inputs in at forward, the same tensors back for recomputation; nothing grows with depth x sequence."""
