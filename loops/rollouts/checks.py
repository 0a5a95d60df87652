"""Requests that no source can answer, refused alike by all of them: asking again would not help."""

import math

from .sample import Request


def check_request(request: Request, *, vocab: int | None = None, context: int | None = None) -> None:
    """Raises unless the request can be answered.

    Args:
        vocab: token ids are below it; None if nothing is known of it.
        context: the longest prompt and answer together; None if nothing limits them.

    Raises:
        ValueError: says what is wrong with which task, and what to do.
    """
    who = f"task {request.task}"
    limit = math.inf if vocab is None else vocab
    longest = len(request.prompt) + request.sampling.max_tokens
    if not request.prompt:
        raise ValueError(f"{who}: its prompt is empty; begin it with the tokenizer's first token or a chat template")
    if not request.indices or len(set(request.indices)) < len(request.indices):
        raise ValueError(f"{who}: indices must be some, and distinct, got {list(request.indices)}")
    for token in request.prompt:
        if not 0 <= token < limit:
            raise ValueError(f"{who}: token {token} of its prompt is outside the vocabulary of {vocab}; "
                              "is its tokenizer that of the model?")  # fmt: skip
    for token in request.sampling.stop:
        if not 0 <= token < limit:
            raise ValueError(f"{who}: stop token {token} is outside the vocabulary of {vocab}")
    if context is not None and longest > context:
        raise ValueError(
            f"{who}: a prompt of {len(request.prompt)} tokens and max_tokens={request.sampling.max_tokens} do not fit "
            f"the model's context of {context}; shorten the prompt or set max_tokens <= {context - len(request.prompt)}"
        )
