"""Completions from vLLM: a server, or an engine in this process.

client     the HTTP interface of a server
server     `VLLMServer`, a source that may die and come back, and `VLLMServers`, several of them
engine     `VLLMEngine`, vLLM in this process
weights    how new weights get to a server or an engine
launch     `ServerProcess`: start a server, and say why it did not start
preflight  check that a server is the required one
plugin/    runs inside vLLM: weights from files
"""
