"""Completions from the trainer's own module.

source    `LocalSource`, and `DetachedSource` on a copy
decode    a sequence under way, the module's forward passes, and the draw of tokens
kv_cache  batches of sequences, and what has been read of them
probe     which kind of batch works with a model
"""
