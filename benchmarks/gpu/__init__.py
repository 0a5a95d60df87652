"""Everything that matters on a GPU, a few minutes at a time: ``burnish bench gpu``; not in the
wheel.
"""
