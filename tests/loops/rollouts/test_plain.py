"""What is stored with a sample is plain data."""

import enum
import json
import types

import numpy as np
import pytest
import torch
from burnish.loops.rollouts.sample import plain


class Kind(enum.IntEnum):
    RIGHT = 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (7, 7),
        (0.5, 0.5),
        ("naïve", "naïve"),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.int64(7), 7),
        (np.bool_(False), False),
        (np.str_("a"), "a"),
        (np.array(0.5), 0.5),
        (np.arange(6).reshape(2, 3), [[0, 1, 2], [3, 4, 5]]),
        (np.array(["a", None, 1], dtype=object), ["a", None, 1]),
        (torch.tensor(7), 7),
        (torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True), 0.5),
        (torch.ones(1, 2), [[1.0, 1.0]]),
        ((1, [np.int8(2), (np.float64(3.0),)]), [1, [2, [3.0]]]),
        ({"a": {np.str_("b"): np.float64(1.0)}, np.int64(2): (3,)}, {"a": {"b": 1.0}, "2": [3]}),
        (types.MappingProxyType({"a": np.int64(1)}), {"a": 1}),
        (Kind.RIGHT, 3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_numbers_text_lists_and_mappings_become_those_of_python(value, expected, tmp_path):
    found = plain(value, "who")
    assert found == expected
    assert types_of(found) == types_of(expected)
    json.dumps(found)
    torch.save(found, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == expected


def types_of(value):
    if isinstance(value, dict):
        return {(type(key), key): types_of(entry) for key, entry in value.items()}
    return [types_of(entry) for entry in value] if isinstance(value, list) else type(value)


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        (object(), "who", "object"),
        ({"a": [1, {2}]}, r"who\['a'\]\[1\]", "set"),
        (b"a", "who", "bytes"),
        (np.complex64(1j), "who", "complex"),
        (np.datetime64("2026-01-01"), "who", "date"),
        (np.array([1, object()], dtype=object), r"who\[1\]", "object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_refused_and_its_place_is_named(value, where, kind):
    with pytest.raises(
        ValueError, match=f"^{where}: wanted numbers, text, lists or mappings, .* got {kind};"
    ):
        plain(value, "who")
