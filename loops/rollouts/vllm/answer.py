"""What vLLM is asked for one answer, and what is made of what it says."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from ..sample import Finish, Request, Sample, SamplingParams, VersionSpan
from ..source import SourceError, SourceLost

# Of vLLM: what has been tested. Its endpoints for training are younger than its promises of stability.
VERSIONS = ("0.32",)
FINISH: dict[str, Finish] = {"stop": "stop", "length": "length", "abort": "aborted"}


def parameters(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """Of vLLM's ``SamplingParams``."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop),
        "ignore_eos": True,  # only what the request calls a stop token is one
        "seed": seed,
        "logprobs": 0,  # of what was drawn, and of nothing else
        "detokenize": False,
    }


def made(
    request: Request,
    index: int,
    tokens: list[int],
    drawn: list[int],
    logprobs: list[float],
    finish: Finish,
    spans: list[VersionSpan],
    tokenizer: PreTrainedTokenizerBase,
) -> Sample:
    """A sample whose parts agree.

    Args:
        drawn: the tokens that vLLM's log-probs are of.

    Raises:
        SourceLost: if there is nothing in it, since the answer was broken off.
        SourceError: if its parts disagree.
    """
    who = f"vllm: answer {index} of task {request.task}"
    if drawn != tokens:
        raise SourceError(f"{who}: it came with {len(drawn)} log-probs for {len(tokens)} tokens, or of other ones")
    if not tokens:
        raise SourceLost(f"{who}: it was broken off before its first token")
    if len(tokens) > request.sampling.max_tokens:
        raise SourceError(f"{who}: asked for at most {request.sampling.max_tokens} tokens, got {len(tokens)}")
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != len(tokens):
        raise SourceError(f"{who}: which weights its {len(tokens)} tokens are from is not said, but {spans}")
    return Sample(
        task=request.task,
        index=index,
        prompt=list(request.prompt),
        tokens=tokens,
        trained=[True] * len(tokens),
        logprobs=logprobs,
        spans=spans,
        finish=finish,
        text=str(tokenizer.decode(tokens, skip_special_tokens=True)),
    )
