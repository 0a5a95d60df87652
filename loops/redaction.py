"""Secrets in settings: left out of what is written, and taken from the environment.

A text is a secret by the name of its setting (api_key, HF_TOKEN, client_secret, password), by its
own form (sk-..., hf_...), or as the login in a URL. Names are compared by whole words: max_tokens,
mask_token and the key of a column are none. A setting may instead hold ``${ENV:NAME}``: what is
stored and shown is this reference, and the variable is read where the setting is used.
"""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

MARK = "<redacted>"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SECRET_WORDS = _words("secret password passwd passphrase credential credentials apikey")
# Words before "token" with which it is no secret: special tokens (pad_token, end_token).
_PLAIN_TOKENS = _words(
    "bos eos pad unk sep cls mask image audio video boi eoi think start stop end special prompt"
)
# Words before "key" with which it is no secret: names of columns or fields (answer_key, sort_key).
_PLAIN_KEYS = _words(
    "answer prompt completion text message messages question image label target score reward id "
    "row column field data dict json map sort group index primary foreign public cache partition"
)
_SHORTEST = 8  # characters of a key or a token; shorter ones name something
# The value of a setting that is called "key" or "token" alone: a secret is no word of a language.
_OPAQUE = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.+/=-]{20,}")
# Keys that say by their form whose they are: OpenAI and Stripe, Hugging Face, GitHub, GitLab,
# Slack, AWS, Google, and JSON web tokens.
_KNOWN = re.compile(
    r"\b(?:(?:sk|rk|pk)-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|AIza[\w-]{35}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
# The user:password of a URL, unless it is a reference.
_LOGIN = re.compile(r"(?<=://)(?![^/\s@]*\$\{ENV:)[^/\s@'\"]+(?=@)")
_REFERENCE = re.compile(r"\$\{ENV:([A-Za-z_]\w*)\}")
# Settings in which references are read.
_USED = ("rewards", "environment", "agent", "order", "vllm", "teacher", "data", "eval_data")

_known_values: set[str] = set()  # secrets of this process, which messages leave out


def is_secret(name: str, value: str) -> bool:
    """True if a text is a secret by the name of its setting."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)  # of api_key, apiKey, HF_TOKEN
    words = [word.lower() for word in words]
    if not words or _REFERENCE.search(value):
        return False
    if _SECRET_WORDS.intersection(words):
        return True
    *before, last = words
    if last not in ("key", "token"):
        return False
    if not before:
        return _OPAQUE.fullmatch(value) is not None
    plain = _PLAIN_TOKENS if last == "token" else _PLAIN_KEYS
    return before[-1] not in plain and len(value) >= _SHORTEST and not re.search(r"\s", value)


def redacted(value: object, name: str = "") -> Any:
    """Settings without their secrets, in place of which there is `MARK`.

    Args:
        value: texts, numbers, and lists and mappings of them.
        name: of the setting.
    """
    if isinstance(value, Mapping):
        return {key: redacted(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(each, name) for each in value]
    if not isinstance(value, str):
        return value
    return MARK if is_secret(name, value) else _without_patterns(value)


def hide(text: str) -> str:
    """A message without the secrets that this process knows, and without what looks like one."""
    for secret in sorted(_known_values, key=len, reverse=True):
        text = text.replace(secret, MARK)
    return _without_patterns(text)


def _without_patterns(text: str) -> str:
    return _KNOWN.sub(MARK, _LOGIN.sub(MARK, text))


class HidingFormatter(logging.Formatter):
    """Formats records of a log without secrets, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))


def resolved(value: Any) -> Any:
    """Settings with the value of the variable in place of each ``${ENV:NAME}``.

    Only texts, lists and dicts are looked into; other objects are returned as they are.

    Raises:
        ValueError: names a variable that is not set.
    """
    if type(value) is dict:
        return {key: resolved(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(resolved, value))
    return _REFERENCE.sub(_variable, value) if isinstance(value, str) else value


def resolved_data(source: Any) -> Any:
    """A source of data with the values of variables; rows in its place stay as they are."""
    parts = source if type(source) is list else [source]
    is_mixture = type(source) is dict and all(isinstance(path, str) for path in source)
    if is_mixture or all(map(_names_data, parts)):
        return resolved(source)
    return source


def _names_data(part: object) -> bool:
    """True for a path, or the fields of a part, which have one; false for a row."""
    return isinstance(part, str) or (type(part) is dict and "path" in part)


def _variable(reference: re.Match[str]) -> str:
    name = reference[1]
    value = os.environ.get(name)
    if value is None:
        raise ValueError(
            f"{reference[0]}: there is no environment variable {name}; set it where the run is started"
        )
    if is_secret(name, value):
        _known_values.add(value)
    return value


def check_settings(config: object) -> None:
    """Check references and marks of a configuration, and learn its secrets for `hide`.

    Raises:
        ValueError: if a variable is not set, a reference stands where none is read, or a secret was
            left out of the file that the configuration comes from.
    """
    for path, value in _texts(config):
        name = path[-1]
        where = ".".join(path)
        if MARK in value:
            raise ValueError(
                f"{where}: the secret was left out when this file was written; give it again, or better "
                f"${{ENV:NAME}}, which is read from the environment"
            )
        if _REFERENCE.search(value):
            if path[0] not in _USED:
                raise ValueError(
                    f"{where}: ${{ENV:NAME}} is read in {', '.join(_USED)} alone; write the value"
                )
            secret = resolved(value)
            if is_secret(name, secret):
                _known_values.add(secret)
        elif is_secret(name, value):
            _known_values.add(value)


def _texts(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each text in settings, with the names that lead to it: (("vllm", "api_key"), "sk-...")."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(each, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each, path)
    elif isinstance(value, str):
        yield path, value
