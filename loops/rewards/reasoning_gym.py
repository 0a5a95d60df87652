"""Tasks of reasoning-gym: questions in burnish's prompt layout, and the verifier of each task."""

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..registry import build, nearest
from ..rollouts.sample import Row, Sample

INSTRUCTION = "Give your final answer between <answer> and </answer>."


@dataclass(frozen=True)
class ReasoningGym:
    """The score in [0, 1] that the verifier of the row's task gives the answer.

    Rows are `reasoning_gym_rows`.

    Args:
        tag: the answer is the text between the last <tag> and </tag>; without them there is none,
            which every task scores 0. An empty tag takes the whole text.

    Library: reasoning-gym (Stojanovski et al. 2025, arXiv:2505.24760), the extra
    `burnish[reasoning]`.
    """

    tag: str = "answer"
    columns: ClassVar[Sequence[str]] = ("task", "entry")

    def __call__(self, row: Row, sample: Sample) -> float:
        answer: str | None = sample.text.strip()
        if self.tag:
            matches = re.findall(f"<{self.tag}>(.*?)</{self.tag}>", sample.text, re.DOTALL)
            answer = matches[-1].strip() if matches else None
        return float(_verifier(row["task"])(answer, json.loads(row["entry"], object_hook=_decoded)))


def reasoning_gym_rows(
    task: str, count: int, *, seed: int, instruction: str = INSTRUCTION, **options: object
) -> list[dict[str, str | list[dict[str, str]]]]:
    """Questions of a task as rows: a prompt, the answer where there is one, and what the verifier
    needs.

    Rows hold the questions themselves, not their seeds: some tasks draw other questions in every
    process.

    Args:
        instruction: text after the question; it should say how to mark the answer, see
            `ReasoningGym`.
        options: the task's own, such as the number of digits.

    Raises:
        ValueError: if there is no such task, or it has no such option; names the nearest.
    """
    gym = _gym(task)
    build(f"reasoning_gym {task}", gym.factory.DATASETS[task][1], options)
    data = gym.create_dataset(task, seed=seed, size=count, **options)
    rows: list[dict[str, Any]] = []
    for entry in map(data.__getitem__, range(count)):
        prompt = [{"role": "user", "content": f"{entry['question']}\n{instruction}".strip()}]
        rows.append(
            {
                "prompt": prompt,
                "answer": entry["answer"],
                "task": task,
                "entry": json.dumps(_encoded(entry)),
            }
        )
    return rows


@functools.cache
def _verifier(task: str) -> Any:
    return _gym(task).get_score_answer_fn(task)


def _gym(task: str) -> Any:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(
            "reasoning_gym: needs the package; pip install 'burnish[reasoning]'"
        ) from error
    if task not in DATASETS:
        raise ValueError(nearest("reasoning_gym: no task", task, DATASETS))
    return reasoning_gym


def _encoded(value: object) -> Any:
    """The value in JSON with tuples and keys preserved: verifiers compare tuples and look up
    numbers, which JSON would turn into lists and texts."""
    if isinstance(value, tuple):
        return {"tuple": [_encoded(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_encoded(key), _encoded(item)] for key, item in value.items()]}
    return [_encoded(item) for item in value] if isinstance(value, list) else value


def _decoded(value: dict[str, Any]) -> Any:
    ((kind, items),) = value.items()
    return tuple(items) if kind == "tuple" else dict(items)
