"""Rollouts: samples of the policy, each with the weights that every token was drawn from.

sample                   one completion, its request, and the checks of both
packed                   numbers of samples in few bytes
arrays                   samples packed, and as tensors that go from one rank to the others
source                   the contract of every source of completions
stop_words               words that end a completion
retries                  failed requests, repeated one completion at a time
replay                   stored samples, a source too
local/                   a source: the trainer's own module
vllm/                    a source: vLLM, a server or in this process
scheduler, event_loops   groups for every step, of bounded staleness, none lost and none twice
"""
