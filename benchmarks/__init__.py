"""Measurements that others can repeat; every figure is gated on a correctness check."""
