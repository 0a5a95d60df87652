"""Texts and conversations as token ids, and which of these the assistant says.

Two ways to find the tokens to train:

    completion   all that the chat template adds to the prompt and its generation prompt, a trailing
                 newline included; plain completions end with the EOS token. Token ids are TRL's.
    assistant    of every turn the tokens that the model generates after the generation prompt, up
                 to its end token: not the role header before them, nor the newline after, nor what
                 others say. Templates with {% generation %} mark them; with others, `turns` finds
                 and proves them by rendering.

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
from .columns import ASSISTANT, IMAGES, BadRow, Message, ParsedRow, common_prefix, images_of
from .images import HOLE, ImageError, ImageReader, ImageRef, Processed
from .records import DataError
from .turns import ADVICE, check_roles, find_begin, full_text, through_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_TRIED: set[str] = set()  # templates that have rendered a conversation within limits


def read_chat_template(template: str | os.PathLike[str]) -> str:
    """Read a chat template, given by its text, which holds {{ or {%, or by its file.

    Raises:
        DataError: if there is no such file.
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
    begin: int  # the character at which the model begins to write; 0 if the template marks tokens
    shortened: bool  # whether the generation prompt lost its end to the turn


@dataclass(frozen=True)
class Encoder:
    """A tokenizer and the text or file of another chat template to use with it.

    ``chat_template_kwargs`` are arguments of the template, such as ``enable_thinking``; a row's own
    ones win. ``images`` reads the images of messages; None for a model that reads text alone.
    """

    tokenizer: "PreTrainedTokenizerBase"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    images: ImageReader | None = None

    def __post_init__(self) -> None:
        if self.chat_template is not None:
            # the class is frozen
            object.__setattr__(self, "chat_template", read_chat_template(self.chat_template))
        for name in self.chat_template_kwargs:
            if not self.uses(name):
                problem = f"the chat template uses no {name!r}"
                raise DataError(f"chat_template_kwargs: {problem}; correct or remove it")

    def continuations(
        self,
        prompt: str | list[Message],
        completions: Sequence[str | list[Message]],
        options: Mapping[str, object],
    ) -> tuple[list[int], list[list[int]], list[list[bool]], bool]:
        """Tokenize a prompt and the completions that go on from it.

        The prompt's tokens are the beginning that the tokens of prompt and of prompt + completion
        share. Where a token spans the boundary, or the template closes the prompt differently, the
        prompt loses its last tokens to the completions.

        Returns:
            The prompt's tokens; the tokens that each completion adds to them; which of these are
            trained, of several messages only the assistant's turns; and whether the prompt lost
            tokens.
        """
        alone: list[int]
        together: list[tuple[list[int], list[bool]]] = []  # prompt and completion, and its mask
        if isinstance(prompt, str):
            alone = self.plain(prompt)
            for completion in completions:
                ids = self.plain(prompt + self.with_eos(str(completion)))
                together.append((ids, [True] * len(ids)))
        else:
            alone = self.chat(prompt, options, generation_prompt=True)
            for completion in completions:
                assert not isinstance(completion, str)
                together.append(self._completion(prompt, completion, options))
        shared = min(common_prefix(alone, ids) for ids, _ in together)
        added = [ids[shared:] for ids, _ in together]
        if not isinstance(prompt, str) and any(map(self._is_blank, added)):
            problem = "the chat template leaves nothing of a completion"
            raise BadRow("empty", f"{problem}; remove the row, or use another template")
        trained = [mask[shared:] for _, mask in together]
        return alone[:shared], added, trained, shared < len(alone)

    def _completion(
        self, prompt: list[Message], completion: list[Message], options: Mapping[str, object]
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a prompt and a completion together, and which of them are trained."""
        messages = [*prompt, *completion]
        if len(completion) == 1 and completion[0].get("train", True):
            render = partial(self.render, options=options)
            ids = self.bare(full_text(render, messages, render(messages)))
            return ids, [True] * len(ids)
        (ids, trained, _), *others = self.assistant(messages, options, start=len(prompt))
        if others:
            problem = (
                "the chat template renders turns of a completion in another way once others follow"
            )
            fix = "give each turn a row of its own, or use another template"
            raise BadRow("template", f"{problem}, so it is no text; {fix}")
        return ids, trained

    def assistant(
        self, messages: list[Message], options: Mapping[str, object], start: int = 0
    ) -> list[tuple[list[int], list[bool], bool]]:
        """Make examples that train the assistant in ``messages[start:]``.

        Messages that say ``train: false`` are not trained.

        Returns:
            Token ids, which of them are trained, and whether a generation prompt lost its end to a
            turn, for each example.
        """
        every = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        turns = []  # the numbers of the messages to train
        for number in every:
            if number >= start and messages[number].get("train", True):
                turns.append(number)
        if not turns:
            problem = "all messages of the assistant's say train: false"
            raise BadRow("empty", f"{problem}; remove the row")

        render = partial(self.render, options=options)
        # By the number of a turn: the conversation through it, as messages and as their text.
        heads = {number: messages[: number + 1] for number in turns}
        rendered = {number: render(head) for number, head in heads.items()}
        full = rendered[turns[-1]]
        check_roles(render, heads[turns[-1]], full)
        found = {}
        for number, head in heads.items():
            found[number] = self._turn(render, head, rendered[number], full)

        # The last turn ends an example. Turns before it that its text holds as they would be
        # generated are trained in the same example; of those that are left, the last ends another.
        examples: list[tuple[list[int], list[bool], bool]] = []
        while turns:
            last = turns[-1]
            text = found[last].text
            together = [number for number in turns if text.startswith(found[number].text)]
            if self._are_marked(heads[last]):
                ids, runs = self._marked(heads[last], options)
                spans = [runs[every.index(number)] for number in together]
            else:
                places = [(found[number].begin, len(found[number].text)) for number in together]
                ids, spans = self._cut(text, places)
                # where a token spans an edge, the last turn alone
                together = together[-len(spans) :]
            trained = self._trained(ids, together, spans)
            shortened = any(found[number].shortened for number in together)
            examples.insert(0, (ids, trained, shortened))
            turns = [number for number in turns if number not in together]
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
        if self._are_marked(messages):
            return _Turn(text.rstrip(), begin=0, shortened=False)
        begin, shortened = find_begin(render, messages, text, self._modes)
        text = through_end(render, messages, text, begin, self._special_tokens, full)
        return _Turn(text, begin, shortened)

    def _are_marked(self, messages: list[Message]) -> bool:
        """True if {% generation %} tells the assistant's tokens.

        The texts of images would shift its marks, so turns of such conversations are found by
        rendering."""
        return self._has_markers and not images_of(messages)

    def _trained(
        self, ids: list[int], numbers: list[int], spans: list[tuple[int, int]]
    ) -> list[bool]:
        """Mark the tokens of turns, each through its end token.

        Args:
            numbers: which messages the turns are.
            spans: the begin and the end of each turn among the ids.
        """
        trained = [False] * len(ids)
        for number, (begin, stop) in zip(numbers, spans, strict=True):
            end = self._end_token(ids, begin, stop, number)
            trained[begin:end] = [True] * (end - begin)
        return trained

    def end_tokens(self, ids: list[int], trained: list[bool]) -> set[int]:
        """The special tokens that end the runs of trained tokens; white space may follow one."""
        ends = set()
        # as bytes, [False, True, True] is \x00\x01\x01
        for run in re.finditer(b"\x01+", bytes(trained)):
            end = self._before_white_space(ids, *run.span())
            if end > run.start() and ids[end - 1] in self.special:
                ends.add(ids[end - 1])
        return ends

    @cached_property
    def reply_end(self) -> set[int]:
        """The token that ends a reply under the chat template; empty if it does not show one."""
        question: Message = {"role": "user", "content": "Ready?"}
        reply: Message = {"role": ASSISTANT, "content": "Yes."}
        try:
            ids, trained, _ = self.assistant([question, reply], {})[-1]
        except ValueError:
            # Where turns are trained such a template is refused; here none is, so it may stay.
            return set()
        return self.end_tokens(ids, trained)

    def plain(self, text: str) -> list[int]:
        """Tokens of a text with the BOS token and others that the tokenizer adds."""
        return self.bare(text, add_special_tokens=True)

    def with_eos(self, text: str) -> str:
        eos = self.tokenizer.eos_token
        if eos is None:
            problem = "the tokenizer has no EOS token to end a plain text with"
            raise ValueError(f"{problem}; set tokenizer.eos_token")
        return text if text.endswith(eos) else text + eos

    def chat(
        self,
        messages: list[Message],
        options: Mapping[str, object],
        generation_prompt: bool = False,
    ) -> list[int]:
        """Token ids of messages; BadRow if the template leaves some out."""
        render = partial(self.render, generation_prompt=generation_prompt, options=options)
        text = render(messages)
        check_roles(render, messages, text)
        return self.bare(text)

    def bare(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of a text without BOS or others that the tokenizer adds.

        So a chat template is tokenized, which writes its own BOS token.
        """
        if self._cuts is not None and not add_special_tokens:
            ids: list[int] = []
            for piece in self._cuts.split(text):
                if piece:
                    ids += self._piece(piece)
            return ids
        encoded = self.tokenizer(
            text,
            verbose=False,  # or it warns of texts longer than the model's maximum
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
        )
        return list(encoded["input_ids"])

    def render(
        self,
        messages: list[Message],
        generation_prompt: bool = False,
        *,
        options: Mapping[str, object],
        **mode: object,
    ) -> str:
        """The text of messages under the chat template.

        Args:
            options: the template's arguments in this row, which win over the encoder's own.
            mode: arguments that both of them win over.
        """
        options = {**mode, **self.chat_template_kwargs, **options}
        shown: list[ImageRef] = []
        if self.images is not None:
            messages = [self._in_parts(message, shown) for message in messages]
        text = str(
            self._apply(messages, options, add_generation_prompt=generation_prompt, tokenize=False)
        )
        return self._with_image_texts(text, shown) if shown else text

    def _in_parts(self, message: Message, shown: list[ImageRef]) -> Message:
        """The message as templates of vision-language models want it.

        Its content is a list of parts where it shows images, or where the template writes no plain
        text.

        Args:
            shown: the images of the messages before, to which this one's are added.
        """
        message = dict(message)
        images = message.pop(IMAGES, ())
        content = str(message.get("content") or "")
        if content.count(HOLE) != len(images):  # `turns` has put another text in its place
            images = ()
        if not images and (self._writes_plain_text or not content):
            return message
        pieces = content.split(HOLE) if images else [content]
        parts: list[Message] = []
        for number, piece in enumerate(pieces):
            if number:
                parts.append({"type": "image"})
            if piece:
                parts.append({"type": "text", "text": piece})
        shown += images
        return {**message, "content": parts}

    def _with_image_texts(self, text: str, images: list[ImageRef]) -> str:
        """The text of a template with what each image becomes in the place of its placeholder."""
        assert self.images is not None
        pieces = text.split(self.images.placeholder)
        if len(pieces) != len(images) + 1:
            counts = f"{len(pieces) - 1} times {self.images.placeholder} for {len(images)} images"
            fix = (
                "remove that text from the messages, or use a template that writes it for an image"
            )
            raise BadRow("images", f"the chat template writes {counts}; {fix}")
        texts = self._read(images).texts
        return pieces[0] + "".join(map(str.__add__, texts, pieces[1:]))

    def _read(self, images: Sequence[ImageRef]) -> Processed:
        assert self.images is not None
        try:
            return self.images.read(images)
        except ImageError as error:
            raise BadRow("bad image", str(error)) from None

    @cached_property
    def _writes_plain_text(self) -> bool:
        """False for a template that reads contents as lists of parts alone."""
        probe: Message = {"role": "user", "content": "5C1F"}
        try:
            return "5C1F" in str(self._apply([probe], {}, tokenize=False))
        except BadRow:
            return False

    def located(self, ids: list[int], messages: list[Message]) -> tuple[ImageRef, ...]:
        """The images among these token ids, with the run of tokens of each.

        Args:
            messages: what the ids are of; they may end after a later one.

        Raises:
            BadRow: if there is an image token that is none of an image's, as when someone has typed
                the text of one.
        """
        if self.images is None:
            return ()
        places = [place for place, token in enumerate(ids) if token == self.images.token]
        shown = images_of(messages)
        typed = self.images.other_tokens.intersection(ids)
        for number in range(len(shown), -1, -1):
            if typed:
                break
            images = shown[:number]
            counts = self._read(images).counts if images else []
            if sum(counts) == len(places):
                edges = [0, *accumulate(counts)]
                return tuple(
                    image._replace(start=places[first], length=places[stop - 1] + 1 - places[first])
                    for image, (first, stop) in zip(images, pairwise(edges), strict=True)
                )
        token = self.tokenizer.convert_ids_to_tokens(min(typed, default=self.images.token))
        raise BadRow(
            "images",
            f"a message holds the text {token}, which stands for what the model sees; remove it from the text",
        )

    def _apply(
        self, messages: list[Message], options: Mapping[str, object], **settings: bool
    ) -> object:
        """What the tokenizer's `apply_chat_template` makes of messages.

        Args:
            options: arguments of the template; ``settings``, transformers' own, win over them.

        Raises:
            BadRow: if the template refuses the messages.
        """
        if not self._source:
            raise ValueError(
                "the row is a conversation and the tokenizer has no chat template; pass one (--chat_template "
                "file.jinja), or give prompts and completions as plain text"
            )
        if options.get("tools") and not self.uses("tools"):
            problem = "the chat template leaves out 'tools'"
            raise BadRow("template", f"{problem}; use one that knows tools, or name no tools")
        # of any type: what a template reads is its own affair
        arguments: dict[str, Any] = {**self.chat_template_kwargs, **options, **settings}
        apply: Callable[..., object] = partial(
            self.tokenizer.apply_chat_template, chat_template=self.chat_template, **arguments
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
        # whatever a template's own code may raise
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            problem = f"the chat template refuses the conversation: {error}"
            raise BadRow("template", problem) from error

    def _try_out(self, apply: Callable[[], object]) -> None:
        """Render the first conversation within limits of time and memory.

        A template is a program of whoever published the model: it may loop without end.

        Raises:
            DataError: says which limit it exceeds.
        """
        if self._source in _TRIED:
            return
        too_much = excess(apply)
        if too_much:
            raise DataError(
                f"chat_template: it takes {too_much} to render one conversation, so it is not used; read it, and give "
                "another (--chat_template file.jinja)"
            )
        _TRIED.add(self._source)

    @cached_property
    def _piece(self) -> Callable[[str], list[int]]:
        """A function that tokenizes a text between two cuts, and remembers the last ones.

        Pieces come several times: a prompt before each of its completions.
        """
        encode = self.tokenizer.backend_tokenizer.encode
        return lru_cache(64)(lambda text: encode(text, add_special_tokens=False).ids)

    @cached_property
    def _cuts(self) -> re.Pattern[str] | None:
        """The added tokens, at which a fast tokenizer cuts a text before it tokenizes each piece.

        None if the cut depends on more: a token strips white space beside it or must be a whole
        word, the first piece of a text gets a space, or a class of tokenizers has rules of its own.
        """
        from transformers import PreTrainedTokenizerFast as Fast

        kind = type(self.tokenizer)
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        has_own_rules = (kind.__call__, kind._encode_plus) != (Fast.__call__, Fast._encode_plus)
        if backend is None or has_own_rules:
            return None
        # A "normalized" one is looked for after normalization, where the text may be another.
        added = backend.get_added_tokens_decoder().values()
        tokens = [token for token in added if not token.normalized]
        looks_beside = any(token.lstrip or token.rstrip or token.single_word for token in tokens)
        # The tokenizers package shows this setting only in its pickled form, which is JSON.
        pre_tokenizer = b""
        if backend.pre_tokenizer:
            pre_tokenizer = backend.pre_tokenizer.__getstate__()
        begins_with_space = b'"prepend_scheme":"first"' in pre_tokenizer
        if looks_beside or begins_with_space or self.tokenizer.split_special_tokens:
            return None
        self.tokenizer("", add_special_tokens=False)  # turns off truncation and padding
        return re.compile(f"({_any_of(token.content for token in tokens)})")

    @cached_property
    def _source(self) -> str:
        """The text of the chat template, of all of them if the tokenizer has several by name."""
        templates = self.chat_template or self.tokenizer.chat_template or ""
        return templates if isinstance(templates, str) else "".join(templates.values())

    @cached_property
    def _has_markers(self) -> bool:
        """True if the template marks what the assistant writes by {% generation %}."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self._source) is not None

    @cached_property
    def _modes(self) -> list[dict[str, bool]]:
        """Settings of the template that may decide how its generation prompt ends."""
        modes = []
        for name in ("enable_thinking", "thinking"):
            if self.uses(name):
                modes += [{name: False}, {name: True}]
        return modes

    def uses(self, name: str) -> bool:
        """True if the chat template has this word, so that an argument of the name is read."""
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    @cached_property
    def unknown(self) -> int | None:
        """The token that stands for text without tokens; None for a tokenizer of bytes."""
        tokenizer = self.tokenizer
        if tokenizer.unk_token in (None, tokenizer.bos_token, tokenizer.eos_token):
            return None  # GPT-2, which knows every text, names its end token so
        unknown: int | None = tokenizer.unk_token_id
        return unknown

    @cached_property
    def special(self) -> frozenset[int]:
        """The ids of special tokens; `all_special_ids` lacks such as <|im_start|>."""
        special = set(self.tokenizer.all_special_ids)
        for index, token in self.tokenizer.added_tokens_decoder.items():
            if token.special:
                special.add(index)
        return frozenset(special)

    @cached_property
    def _special_tokens(self) -> re.Pattern[str]:
        tokens = self.tokenizer.convert_ids_to_tokens(sorted(self.special))
        return re.compile(_any_of(map(str, tokens)))

    def names_special_token(self, row: ParsedRow) -> bool:
        """True if a message holds the text of a special token: it would become that token."""
        for value in (row.prompt, *row.completions):
            messages = value if isinstance(value, list) else []
            for message in messages:
                if self._special_tokens.search(message.get("content") or ""):
                    return True
        return False

    def _marked(
        self, messages: list[Message], options: Mapping[str, object]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the runs of ids within {% generation %}, one for each assistant message."""
        out = self._apply(
            messages, options, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert isinstance(out, Mapping)
        # [0, 1, 1, 0, 1] has its edges at 1, 3, 4, 5: the runs are (1, 3) and (4, 5)
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
        """Token ids of a text that ends with a turn, and where each of its turns is among them.

        ``turns`` are the characters at which each of them begins and ends. If a token spans the
        edge of one, the last turn alone is cut off: its tokens then follow the prompt's tokens, as
        when they are generated.
        """
        ids = self.bare(text)
        edges = [edge for turn in turns for edge in turn]
        pieces = [self.bare(text[a:b]) for a, b in pairwise([0, *edges])]
        bounds = list(accumulate(map(len, pieces)))
        if list(chain.from_iterable(pieces)) != ids:
            # Some tokenizers treat the beginning of a text in their own way: compare whole
            # prefixes, which takes longer.
            prefixes = [self.bare(text[:edge]) for edge in edges]
            bounds = list(map(len, prefixes))
            if any(ids[: len(prefix)] != prefix for prefix in prefixes):
                prompt = prefixes[-2]
                turn = self.bare(text[edges[-2] :])
                if self._decoded(prompt + turn) != self._decoded(ids):
                    problem = "a token spans the edge of what the assistant writes"
                    raise BadRow("template", f"{problem}; {ADVICE}")
                ids = prompt + turn
                bounds = [len(prompt), len(ids)]
        return ids, list(zip(bounds[::2], bounds[1::2], strict=True))

    def _end_token(self, ids: list[int], begin: int, stop: int, number: int) -> int:
        """The end of a turn in ``ids[begin:stop]``: after its end token, before white space.

        Args:
            number: of the turn's message, for errors.
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
    """The message with the arguments of its tool calls as JSON, as OpenAI writes them."""
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(call["function"].get("arguments"), ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return message | {"tool_calls": calls} if calls else message


def vocabulary_differences(
    first: "PreTrainedTokenizerBase", second: "PreTrainedTokenizerBase"
) -> Iterator[tuple[int, str, str | None]]:
    """Yield the ids of ``first``, in order, that ``second`` has for another token or not at all.

    Each comes with its token in ``first``, and with its token in ``second`` or None.
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
