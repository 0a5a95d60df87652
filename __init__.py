"""burnish: post-training objectives as pure functions, on fused log-prob kernels, driven by a readable loop."""

__version__ = "0.1.0"
