"""Texts and conversations as token ids, the assistant's tokens among them, and whether two
vocabularies agree.

Two ways to find the tokens to train:

    completion   all that the chat template adds to the prompt and its generation prompt, a trailing newline included;
                 plain completions end with the EOS token. Token ids are TRL's.
    assistant    of every turn the tokens that the model generates after the generation prompt, up to its end token: not
                 the role header before them, nor the newline after, nor what others say. Templates
                 with {% generation %} mark them; with others, `turns` finds and proves them by
                 rendering.

A template may render a turn in another way once others follow: Qwen3 leaves out its reasoning,
gpt-oss ends it with another token. Then a conversation is several examples, each of which ends with
a turn as the model generates it, after what the template makes of the turns before: each turn is
trained once, in the context in which it would be generated.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from .bounded import excess
from .columns import ASSISTANT, BadRow, Message, ParsedRow, common_prefix
from .records import DataError
from .turns import ADVICE, check_roles, find_begin, full_text, through_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TRIED: set[str] = set()  # templates that have rendered a conversation within limits


def read_chat_template(template: str | os.PathLike[str]) -> str:
    """A chat template, given by its text, which holds {{ or {%, or by its file; DataError if that
    does not exist.
    """
    if isinstance(template, str) and re.search(r"\{[{%]", template):
        return template
    if not Path(template).is_file():
        wanted = "wanted a file, or the text of a template, which has {{ ... }} or {% ... %}"
        raise DataError(f"chat_template: there is no file {str(template)!r}; {wanted}")
    return Path(template).read_text(encoding="utf-8")


class _Turn(NamedTuple):
    """The text of a conversation through the end of an assistant's turn."""

    text: str
    # the character of the text at which the model begins to write; 0 if the template marks its
    # tokens
    begin: int
    shortened: bool  # whether the generation prompt lost its end to the turn


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and the text or file of another chat template to use with it.

    ``chat_template_kwargs`` are arguments of the template, such as ``enable_thinking``; a row's own
    ones win.
    """

    tokenizer: "PreTrainedTokenizerBase"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chat_template is not None:
            object.__setattr__(self, "chat_template", read_chat_template(self.chat_template))
        for name in self.chat_template_kwargs:
            if not self.uses(name):
                raise DataError(
                    f"chat_template_kwargs: the chat template uses no {name!r}; correct or remove it"
                )

    def continuations(
        self,
        prompt: str | list[Message],
        completions: Sequence[str | list[Message]],
        options: Mapping[str, Any],
    ) -> tuple[list[int], list[list[int]], list[list[bool]], bool]:
        """Token ids of the prompt, the tokens that each completion adds to it, and which of these
        are trained.

        The prompt's tokens are the beginning that the tokens of prompt and of prompt + completion
        share. Where a token spans the boundary, or the template closes the prompt differently, the
        prompt loses its last tokens to the completions: the last value returned is whether it did.
        Of a completion of several messages only the assistant's turns are trained.
        """
        if isinstance(prompt, str):
            alone = self.plain(prompt)
            texts = [prompt + self.with_eos(str(completion)) for completion in completions]
            encoded = map(self.plain, texts)
            together = [(ids, [True] * len(ids)) for ids in encoded]
        else:
            alone = self.chat(prompt, options, generation_prompt=True)
            together = [self._completion(prompt, list(c), options) for c in completions]  # type: ignore[arg-type]
        shared = min(common_prefix(alone, ids) for ids, _ in together)
        added = [ids[shared:] for ids, _ in together]
        if not isinstance(prompt, str) and any(self._is_blank(ids) for ids in added):
            problem = "the chat template leaves nothing of an answer"
            raise BadRow("empty", f"{problem}; remove the row, or use another template")
        trained = [mask[shared:] for _, mask in together]
        return alone[:shared], added, trained, shared < len(alone)

    def _completion(
        self, prompt: list[Message], completion: list[Message], options: Mapping[str, Any]
    ) -> tuple[list[int], list[bool]]:
        messages = [*prompt, *completion]
        if len(completion) == 1 and completion[0].get("train", True):
            render = partial(self.render, options=options)
            ids = self.bare(full_text(render, messages, render(messages)))
            return ids, [True] * len(ids)
        (ids, trained, _), *others = self.assistant(messages, options, start=len(prompt))
        if others:
            problem = "the chat template renders turns of an answer in another way once others follow, so it is no text"
            raise BadRow(
                "template", f"{problem}; give each turn a row of its own, or use another template"
            )
        return ids, trained

    def assistant(
        self, messages: list[Message], options: Mapping[str, Any], start: int = 0
    ) -> list[tuple[list[int], list[bool], bool]]:
        """Examples that train the assistant in ``messages[start:]``, but for messages that say
        ``train: false``.

        Each is token ids, which of them are trained, and whether a generation prompt lost its end
        to a turn.
        """
        every = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        turns = [
            number for number in every if number >= start and messages[number].get("train", True)
        ]
        if not turns:
            raise BadRow(
                "empty", "all messages of the assistant's say train: false; remove the row"
            )
        render = partial(self.render, options=options)
        heads = {n: messages[: n + 1] for n in turns}
        rendered = {n: render(head) for n, head in heads.items()}
        full = rendered[turns[-1]]
        check_roles(render, heads[turns[-1]], full)
        found = {n: self._turn(render, head, rendered[n], full) for n, head in heads.items()}
        examples: list[tuple[list[int], list[bool], bool]] = []
        while turns:
            last = turns[-1]
            together = [n for n in turns if found[last].text.startswith(found[n].text)]
            if self._has_markers:
                ids, runs = self._marked(heads[last], options)
                spans = [runs[every.index(n)] for n in together]
            else:
                places = [(found[n].begin, len(found[n].text)) for n in together]
                ids, spans = self._cut(found[last].text, places)
                # where a token spans an edge, the last turn alone
                together = together[-len(spans) :]
            trained = self._trained(ids, together, spans)
            shortened = any(found[n].shortened for n in together)
            examples.insert(0, (ids, trained, shortened))
            turns = [n for n in turns if n not in together]
        return examples

    def _turn(
        self, render: Callable[..., str], messages: list[Message], text: str, full: str
    ) -> _Turn:
        """The last turn of some messages, as the model writes it.

        Args:
            text: the messages as the template renders them.
            full: the text of these and all later messages.
        """
        text = full_text(render, messages, text)
        if self._has_markers:
            return _Turn(text.rstrip(), begin=0, shortened=False)
        begin, shortened = find_begin(render, messages, text, self._modes)
        text = through_end(render, messages, text, begin, self._special_tokens, full)
        return _Turn(text, begin, shortened)

    def _trained(
        self, ids: list[int], numbers: list[int], spans: list[tuple[int, int]]
    ) -> list[bool]:
        """Mark the tokens of turns, each through its end token; ``numbers`` says which messages
        they are.
        """
        trained = [False] * len(ids)
        for number, (begin, stop) in zip(numbers, spans, strict=True):
            end = self._end_token(ids, begin, stop, number)
            trained[begin:end] = [True] * (end - begin)
        return trained

    def end_tokens(self, ids: list[int], trained: list[bool]) -> set[int]:
        """The special tokens that end the runs of trained tokens; white space may follow one."""
        ends = set()
        for run in re.finditer(b"\x01+", bytes(trained)):
            end = self._before_white_space(ids, *run.span())
            if end > run.start() and ids[end - 1] in self.special:
                ends.add(ids[end - 1])
        return ends

    @cached_property
    def reply_end(self) -> set[int]:
        """The token that ends a reply under the chat template; empty if the template does not show
        it.
        """
        question: Message = {"role": "user", "content": "Ready?"}
        reply: Message = {"role": ASSISTANT, "content": "Yes."}
        try:
            ids, trained, _ = self.assistant([question, reply], {})[-1]
        except (
            ValueError
        ):  # such a template is refused where its turns are trained; here nothing is
            return set()
        return self.end_tokens(ids, trained)

    def plain(self, text: str) -> list[int]:
        return self.bare(text, add_special_tokens=True)

    def with_eos(self, text: str) -> str:
        eos = self.tokenizer.eos_token
        if eos is None:
            raise ValueError(
                "the tokenizer has no EOS token to end a plain text with; set tokenizer.eos_token"
            )
        return text if text.endswith(eos) else text + eos

    def chat(
        self, messages: list[Message], options: Mapping[str, Any], generation_prompt: bool = False
    ) -> list[int]:
        """Token ids of messages; BadRow if the template leaves some out."""
        render = partial(self.render, generation_prompt=generation_prompt, options=options)
        text = render(messages)
        check_roles(render, messages, text)
        return self.bare(text)

    def bare(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of a text without BOS or others that the tokenizer adds; a template writes its own
        BOS.
        """
        if self._cuts is not None and not add_special_tokens:
            return [
                token for piece in self._cuts.split(text) if piece for token in self._piece(piece)
            ]
        settings: dict[str, Any] = {
            "add_special_tokens": add_special_tokens,
            "return_attention_mask": False,
        }
        return list(self.tokenizer(text, verbose=False, **settings)["input_ids"])

    def render(
        self,
        messages: list[Message],
        generation_prompt: bool = False,
        *,
        options: Mapping[str, Any],
        **mode: Any,
    ) -> str:
        options = {**mode, **self.chat_template_kwargs, **options}
        return str(
            self._apply(messages, options, add_generation_prompt=generation_prompt, tokenize=False)
        )

    def _apply(self, messages: list[Message], options: Mapping[str, Any], **settings: Any) -> Any:
        if not self._source:
            raise ValueError(
                "the row is a conversation and the tokenizer has no chat template; pass one (--chat_template "
                "file.jinja), or give prompts and completions as plain text"
            )
        if options.get("tools") and not self.uses("tools"):
            raise BadRow(
                "template",
                "the chat template leaves out 'tools'; use one that knows tools, or name no tools",
            )
        settings = {**self.chat_template_kwargs, **options, **settings}
        apply = partial(
            self.tokenizer.apply_chat_template, chat_template=self.chat_template, **settings
        )
        self._try_out(partial(apply, conversation=messages))
        try:
            try:
                return apply(conversation=messages)
            except TypeError:  # DeepSeek's and others join arguments to text, and want them as JSON
                texts = list(map(_with_json_arguments, messages))
                if texts == messages:
                    raise
                return apply(conversation=texts)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise BadRow(
                "template", f"the chat template refuses the conversation: {error}"
            ) from error

    def _try_out(self, apply: Callable[[], Any]) -> None:
        """Render the first conversation within limits, as a template may loop without end, or fill
        the memory.

        Raises:
            DataError: says which limit it exceeds.
        """
        if self._source in _TRIED:
            return
        if too_much := excess(apply):
            raise DataError(
                f"chat_template: it takes {too_much} to render one conversation, so it is not used; read it, and give "
                "another (--chat_template file.jinja)"
            )
        _TRIED.add(self._source)

    @cached_property
    def _piece(self) -> Callable[[str], list[int]]:
        """The tokens of a text between two cuts; pieces come several times: a prompt before each of
        its completions.
        """
        encode = self.tokenizer.backend_tokenizer.encode
        return lru_cache(64)(lambda text: encode(text, add_special_tokens=False).ids)

    @cached_property
    def _cuts(self) -> re.Pattern[str] | None:
        """The added tokens at which a fast tokenizer cuts a text before it looks at each piece by
        itself.

        None if the cut depends on more: a token strips white space beside it or must be a whole
        word, the first piece of a text gets a space, or a class of tokenizers has rules of its own.
        """
        from transformers import PreTrainedTokenizerFast as Fast

        kind = type(self.tokenizer)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        has_own_rules = (kind.__call__, kind._encode_plus) != (Fast.__call__, Fast._encode_plus)
        if backend is None or has_own_rules:
            return None
        tokens = [
            token for token in backend.get_added_tokens_decoder().values() if not token.normalized
        ]
        looks_beside = any(token.lstrip or token.rstrip or token.single_word for token in tokens)
        pre_tokenizer = backend.pre_tokenizer.__getstate__() if backend.pre_tokenizer else b""
        if (
            looks_beside
            or b'"prepend_scheme":"first"' in pre_tokenizer
            or self.tokenizer.split_special_tokens
        ):
            return None
        self.tokenizer("", add_special_tokens=False)  # turns off truncation and padding
        return re.compile(f"({_any_of(token.content for token in tokens)})")

    @cached_property
    def _source(self) -> str:
        templates = self.chat_template or self.tokenizer.chat_template or ""
        return templates if isinstance(templates, str) else "".join(templates.values())

    @cached_property
    def _has_markers(self) -> bool:
        return re.search(r"\{%-?\s*generation\s*-?%\}", self._source) is not None

    @cached_property
    def _modes(self) -> list[dict[str, Any]]:
        """Settings of the template that may decide how its generation prompt ends."""
        names = [name for name in ("enable_thinking", "thinking") if self.uses(name)]
        return [{name: value} for name in names for value in (False, True)]

    def uses(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    @cached_property
    def special(self) -> frozenset[int]:
        added = {
            index for index, token in self.tokenizer.added_tokens_decoder.items() if token.special
        }
        return frozenset(added | set(self.tokenizer.all_special_ids))

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        return re.compile(
            _any_of(map(str, self.tokenizer.convert_ids_to_tokens(sorted(self.special))))
        )

    def names_special_token(self, row: ParsedRow) -> bool:
        """True if a message holds the text of a special token, which the tokenizer takes for that
        token.
        """
        conversations = [
            value for value in (row.prompt, *row.completions) if isinstance(value, list)
        ]
        for message in chain.from_iterable(conversations):
            if self._special_tokens.search(message.get("content") or ""):
                return True
        return False

    def _marked(
        self, messages: list[Message], options: Mapping[str, Any]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the runs of ids within {% generation %}: one for each message of the
        assistant's.
        """
        out = self._apply(
            messages, options, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = [0, *out["assistant_masks"], 0]
        edges = [index for index, (before, after) in enumerate(pairwise(mask)) if before != after]
        runs = list(zip(edges[::2], edges[1::2], strict=True))
        turns = sum(message["role"] == ASSISTANT for message in messages)
        if len(runs) != turns:
            problem = f"{{% generation %}} in the chat template marks {len(runs)} runs of tokens"
            fix = "put it around each of them, inside the loop over messages"
            raise BadRow("template", f"{problem}, and the assistant has {turns} messages; {fix}")
        return list(out["input_ids"]), runs

    def _cut(
        self, text: str, turns: list[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a text that ends with a turn, and the runs of its turns, given by their
        characters.

        If a token spans the edge of one, the last turn alone is cut off: its tokens then follow the
        prompt's tokens, as when they are generated.
        """
        ids = self.bare(text)
        edges = [edge for turn in turns for edge in turn]
        pieces = [self.bare(text[a:b]) for a, b in pairwise([0, *edges])]
        bounds = list(accumulate(map(len, pieces)))
        if list(chain.from_iterable(pieces)) != ids:
            # Some tokenizers treat the beginning of a text in their own way: compare whole
            # prefixes.
            prefixes = [self.bare(text[:edge]) for edge in edges]
            bounds = list(map(len, prefixes))
            if any(ids[: len(prefix)] != prefix for prefix in prefixes):
                prompt = prefixes[-2]
                turn = self.bare(text[edges[-2] :])
                if self._decoded(prompt + turn) != self._decoded(ids):
                    raise BadRow(
                        "template", f"a token spans the edge of what the assistant writes; {ADVICE}"
                    )
                ids = prompt + turn
                bounds = [len(prompt), len(ids)]
        return ids, list(zip(bounds[::2], bounds[1::2], strict=True))

    def _end_token(self, ids: list[int], begin: int, stop: int, number: int) -> int:
        """The end of a turn in ``ids[begin:stop]``: after its end token, which only white space may
        follow.
        """
        end = self._before_white_space(ids, begin, stop)
        name = f"message {number + 1}, the assistant's,"
        if end == begin or ids[end - 1] not in self.special:
            raise BadRow(
                "template",
                f"the chat template ends {name} without an end token, so the model would not learn to stop; use a "
                "template that writes one (within {% generation %}, if it has that), or train on all tokens",
            )
        if self._is_blank(ids[begin:end]):
            problem = f"nothing of {name} is left under the chat template"
            raise BadRow("empty", f"{problem}; remove the row or use another template")
        return end

    def _before_white_space(self, ids: list[int], begin: int, stop: int) -> int:
        """The end of ``ids[begin:stop]`` without the white space that it ends with."""
        end = stop
        while end > begin and ids[end - 1] not in self.special and not self._decoded(ids[end - 1]):
            end -= 1
        return end

    def _is_blank(self, ids: list[int]) -> bool:
        return not self._decoded(ids, skip_special_tokens=True)

    def _decoded(self, ids: int | list[int], **options: bool) -> str:
        return str(self.tokenizer.decode(ids, **options)).strip()


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of one of some texts, longer ones first; it matches nothing if there are none."""
    alternatives = map(re.escape, sorted(texts, key=len, reverse=True))
    return "|".join(alternatives) or "(?!)"


def _with_json_arguments(message: Message) -> Message:
    calls = [
        call | {"function": dict(call["function"])} for call in message.get("tool_calls") or ()
    ]
    for call in calls:
        call["function"]["arguments"] = json.dumps(
            call["function"].get("arguments"), ensure_ascii=False
        )
    return message | {"tool_calls": calls} if calls else message


def vocabulary_differences(
    first: "PreTrainedTokenizerBase", second: "PreTrainedTokenizerBase"
) -> Iterator[tuple[int, str, str | None]]:
    """Ids of ``first``, in order, that ``second`` has for another token or not at all: (id, token,
    other or None).
    """
    tokens = {index: token for token, index in first.get_vocab().items()}
    others = {index: token for token, index in second.get_vocab().items()}
    for index in sorted(tokens):
        other = others.get(index)
        if tokens[index] != other:
            yield index, tokens[index], other


def check_same_vocabulary(
    student: "PreTrainedTokenizerBase", teacher: "PreTrainedTokenizerBase"
) -> None:
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
