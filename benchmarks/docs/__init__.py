"""The gallery of objectives, drawn from the code: ``python -m burnish.benchmarks.docs.gallery``."""
