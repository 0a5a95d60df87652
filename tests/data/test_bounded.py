"""Chat templates that never end, or fill the memory, are refused in seconds."""

import os
import time
from functools import partial

import burnish.data.chat as chat
import psutil
import pytest
from burnish.data import DataError, encode_supervised
from burnish.data.bounded import excess
from burnish.data.records import load

FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": (FOREVER + "{% endfor %}", "more than 1 s"),
    "a long text": ("{{ ('a' * 10**11) | length }}", "more than 1024 MiB of memory"),
    "a wide field": ("{{ '%099999999999d' % 1 }}", "more than 1024 MiB of memory"),
    "a text that doubles": (
        "{% set ns = namespace(text='aa') %}{% for i in range(60) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}",
        "more than (1024 MiB of memory|1 s)",
    ),
}
ROWS = [
    {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
]


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_is_refused_within_seconds(kind, byte_tokenizer, monkeypatch):
    template, limit = HOSTILE[kind]
    monkeypatch.setattr(chat, "excess", partial(excess, seconds=1))
    tokenizer = byte_tokenizer(None)
    tokenizer.chat_template = template
    began = time.process_time()
    with pytest.raises(
        DataError, match=f"chat_template: it takes {limit} to render one conversation"
    ):
        encode_supervised([load(ROWS)], tokenizer)
    assert time.process_time() - began < 2, "this process rendered it, too"


def test_a_template_is_tried_out_once(byte_tokenizer, monkeypatch):
    tried = []
    monkeypatch.setattr(chat, "_TRIED", set())
    monkeypatch.setattr(chat, "excess", lambda call: tried.append(call))
    tokenizer = byte_tokenizer(None)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>\n{% endfor %}"
    )
    encoder = chat.Encoder(tokenizer)
    for _ in range(3):
        encoder.render(ROWS[0]["messages"], options={})
    chat.Encoder(tokenizer).render(ROWS[0]["messages"], options={})
    assert len(tried) == 1


def test_a_call_within_limits_leaves_no_trace():
    here, children = os.getpid(), psutil.Process().children()
    made = []
    assert excess(lambda: made.append(os.getpid())) is None
    assert excess(lambda: 1 / 0) is None, "this process makes the call, and raises its error"
    assert made == [] and os.getpid() == here
    assert psutil.Process().children() == children


def test_one_that_waits_without_computing_is_given_up(monkeypatch):
    monkeypatch.setattr("burnish.data.bounded._PATIENCE", 0.2)
    assert excess(lambda: time.sleep(60)) is None
