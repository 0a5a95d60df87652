"""Texts and conversations as token ids, the assistant's tokens among them, and whether two vocabularies agree.

Two ways to find what is trained:

    completion   all that the chat template adds to the prompt and its generation prompt, a trailing newline included;
                 plain completions end with the EOS token. Token ids are those of TRL.
    assistant    of every turn the assistant's own tokens up to its end token: not the role header before them, nor the
                 newline after. Templates with {% generation %} say so themselves; with others, message i begins where
                 the rendering of messages[:i] plus generation prompt ends, and it ends where messages[:i+1] ends.
                 That holds only for a template that renders a message the same whatever follows it: others are refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from .columns import BadRow, Message, PlainOrChat
from .records import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


ADVICE = (
    "pass a chat template with {% generation %} ... {% endgeneration %} around all that the assistant writes, end "
    "token included; or give each answer a row of its own, in the columns prompt and completion; or train on all tokens"
)


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and the chat template to use with it: None is the tokenizer's own."""

    tokenizer: "PreTrainedTokenizerBase"
    chat_template: str | None = None

    def continuations(
        self, prompt: PlainOrChat, completions: Sequence[PlainOrChat], options: Mapping[str, Any]
    ) -> tuple[list[int], list[list[int]], bool]:
        """Token ids of the prompt, those that each completion adds to it, and whether the prompt lost its end.

        The prompt is what its own tokens have in common with those of prompt + completion. Where a token spans the
        boundary, or the template closes the prompt differently, it loses its last tokens to the completions.
        """
        if isinstance(prompt, str):
            alone = self.plain(prompt)
            together = [self.plain(prompt + self.with_eos(str(completion))) for completion in completions]
        else:
            alone = self.chat(prompt, options, generation_prompt=True)
            together = [self.chat([*prompt, *completion], options) for completion in completions]
        shared = min(common_prefix(alone, ids) for ids in together)
        added = [ids[shared:] for ids in together]
        if not isinstance(prompt, str) and any(self._is_blank(ids) for ids in added):
            raise BadRow(
                "empty",
                "nothing of an answer is left under the chat template; remove the row, or use another template",
            )
        return alone[:shared], added, shared < len(alone)

    def assistant(
        self, messages: list[Message], options: Mapping[str, Any], start: int = 0
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a conversation, and which are the assistant's in ``messages[start:]``."""
        ids, spans = (self._marked if self._has_markers else self._by_prefixes)(messages, options)
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(turns):
            raise BadRow(
                "template",
                f"{{% generation %}} in the chat template marks {len(spans)} runs of tokens, and the assistant has "
                f"{len(turns)} messages; put it around each of them, inside the loop over messages",
            )
        trained = [False] * len(ids)
        for (begin, stop), number in zip(spans, turns, strict=True):
            end = self._end_token(ids, begin, stop, number)
            if number >= start:
                trained[begin:end] = [True] * (end - begin)
        return ids, trained

    def plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text=text, verbose=False)["input_ids"])

    def with_eos(self, text: str) -> str:
        eos = self.tokenizer.eos_token
        if eos is None:
            raise ValueError("the tokenizer has no EOS token to end a plain text with; set tokenizer.eos_token")
        return text if text.endswith(eos) else text + eos

    def steps(
        self, prompt: PlainOrChat, steps: Sequence[str], separator: str, options: Mapping[str, Any]
    ) -> tuple[list[int], list[list[int]]]:
        """Token ids of the prompt and of each step with the separator after it, each tokenized alone.

        As TRL did before 1.0, so that no token spans the end of a step; a plain prompt begins with the BOS token where
        there is one.
        """
        if isinstance(prompt, str):
            bos = self.tokenizer.bos_token_id
            before = [*([] if bos is None else [bos]), *self.bare(prompt)]
        else:
            before = self.chat(prompt, options, generation_prompt=True)
        end = self.bare(separator)
        if not end:
            raise ValueError(f"separator: wanted text that the tokenizer has a token for, got {separator!r}")
        return before, [self.bare(step) + end for step in steps]

    def chat(
        self, messages: list[Message], options: Mapping[str, Any], *, generation_prompt: bool = False
    ) -> list[int]:
        return self.bare(self._render(messages, options, generation_prompt))

    def bare(self, text: str) -> list[int]:
        """Tokens of a text without those that the tokenizer adds; a template writes its own BOS."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _render(self, messages: list[Message], options: Mapping[str, Any], generation_prompt: bool = False) -> str:
        return str(self._apply(messages, options, add_generation_prompt=generation_prompt, tokenize=False))

    def _apply(self, messages: list[Message], options: Mapping[str, Any], **settings: Any) -> Any:
        if not self._source:
            raise ValueError(
                "the row is a conversation and the tokenizer has no chat template; pass one (--chat_template "
                "file.jinja), or give prompts and completions as plain text"
            )
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self.chat_template, **{**options, **settings}
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadRow("template", f"the chat template refuses the conversation: {error}") from error

    @cached_property
    def _source(self) -> str:
        templates = self.chat_template or self.tokenizer.chat_template or ""
        return templates if isinstance(templates, str) else "".join(templates.values())

    @cached_property
    def _has_markers(self) -> bool:
        return re.search(r"\{%-?\s*generation\s*-?%\}", self._source) is not None

    @cached_property
    def _special(self) -> frozenset[int]:
        added = {index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return frozenset(added | set(self.tokenizer.all_special_ids))

    def _marked(self, messages: list[Message], options: Mapping[str, Any]) -> tuple[list[int], list[tuple[int, int]]]:
        out = self._apply(messages, options, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = [0, *out["assistant_masks"], 0]
        edges = [index for index, (before, after) in enumerate(pairwise(mask)) if before != after]
        return list(out["input_ids"]), list(zip(edges[::2], edges[1::2], strict=True))

    def _by_prefixes(
        self, messages: list[Message], options: Mapping[str, Any]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        text = self._render(messages, options)
        cuts: list[int] = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:number], options, generation_prompt=True)
                after = self._render(messages[: number + 1], options)
                if not (text.startswith(after) and after.startswith(before)):
                    raise BadRow(
                        "template",
                        f"the chat template renders message {number + 1}, the assistant's, in another way when others "
                        f"follow it or when it is generated, so its tokens can't be told from the rest; {ADVICE}",
                    )
                cuts += [len(before), len(after.rstrip())]
        ids = self.bare(text)
        bounds = self._token_bounds(text, ids, cuts)
        return ids, list(zip(bounds[::2], bounds[1::2], strict=True))

    def _token_bounds(self, text: str, ids: list[int], cuts: list[int]) -> list[int]:
        """The number of tokens before each cut of the text."""
        pieces = [self.bare(text[a:b]) for a, b in pairwise([0, *cuts, len(text)])]
        if [token for piece in pieces for token in piece] == ids:
            return list(accumulate(map(len, pieces)))[:-1]
        # Some tokenizers treat the beginning of a text in their own way: compare whole prefixes, which takes longer.
        prefixes = [self.bare(text[:cut]) for cut in cuts]
        if any(ids[: len(prefix)] != prefix for prefix in prefixes):
            raise BadRow(
                "template", f"a token spans the edge of what the assistant writes, so it can't be cut there; {ADVICE}"
            )
        return [len(prefix) for prefix in prefixes]

    def _end_token(self, ids: list[int], begin: int, stop: int, number: int) -> int:
        """The end of a turn in ``ids[begin:stop]``: after its end token, which only white space may follow."""
        end = stop
        while end > begin and ids[end - 1] not in self._special and not self._decoded(ids[end - 1]):
            end -= 1
        if end == begin or ids[end - 1] not in self._special:
            raise BadRow(
                "template",
                f"the chat template ends message {number + 1}, the assistant's, without an end token, so the model "
                "would not learn to stop; use a template that writes one (within {% generation %}, if it has that), or "
                "train on all tokens",
            )
        if self._is_blank(ids[begin:end]):
            raise BadRow(
                "empty",
                f"nothing of message {number + 1}, the assistant's, is left under the chat template; remove the row or "
                "use another template",
            )
        return end

    def _is_blank(self, ids: list[int]) -> bool:
        return not self._decoded(ids, skip_special_tokens=True)

    def _decoded(self, ids: int | list[int], **options: bool) -> str:
        return str(self.tokenizer.decode(ids, **options)).strip()


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def vocabulary_differences(
    first: "PreTrainedTokenizerBase", second: "PreTrainedTokenizerBase"
) -> Iterator[tuple[int, str, str | None]]:
    """Ids of ``first``, in order, that ``second`` has for another token or not at all: (id, token, other or None)."""
    tokens, others = ({index: token for token, index in one.get_vocab().items()} for one in (first, second))
    return ((index, tokens[index], others.get(index)) for index in sorted(tokens) if tokens[index] != others.get(index))


def check_same_vocabulary(student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase") -> None:
    """Refuse a teacher whose tokens are not the student's; only ids that both have are compared.

    Raises:
        DataError: naming the first id that stands for different tokens.
    """
    for index, token, other in vocabulary_differences(student, teacher):
        if other is not None:
            raise DataError(
                f"teacher: token {index} is {other!r}, and {token!r} for the student, so their "
                "probabilities are of different things; choose a teacher and a student that share a tokenizer"
            )
