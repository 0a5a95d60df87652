"""What training sees of a record: one prompt and the completions that continue it, as token ids."""

from typing import NamedTuple


class Example(NamedTuple):
    """One prompt and its completions: one for SFT, two (chosen, rejected) for a pair, G for a group.

    ``prompt`` holds at least one token, because the first token of a completion is predicted from the last of the
    prompt. ``trained[i][t]`` says whether token ``t`` of completion ``i`` carries loss: in a conversation of several
    turns, what the user says after the first answer is part of the completion and is not trained. Of a solution in
    steps it says where each step ends, which is where the step is judged.
    """

    prompt: list[int]
    completions: list[list[int]]
    trained: list[list[bool]]
