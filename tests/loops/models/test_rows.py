"""Rows: where each trained token is predicted from, and who sees whom."""

import random

import pytest
import torch
from burnish.data import Example
from burnish.loops.batch import collate
from burnish.loops.models.policy import Policy
from burnish.loops.models.rows import arrange
from tiny import make_examples, make_model
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils._python_dispatch import TorchDispatchMode

LAYOUTS = ("padded", "packed", "shared")


def context(rows, predictor):
    """The tokens that a position of the flattened rows may see, in the order of their positions."""
    width = rows.input_ids.shape[1]
    row, place = divmod(int(predictor), width)
    ids, positions = rows.input_ids[row], rows.position_ids[row]
    if rows.attention_mask is None:  # packed: back to the last position 0
        start = max(i for i in range(place + 1) if positions[i] == 0)
        seen = range(start, place + 1)
    elif rows.attention_mask.ndim == 2:
        seen = [i for i in range(place + 1) if rows.attention_mask[row, i]]
    else:
        seen = [i for i in range(width) if rows.attention_mask[row, 0, place, i]]
    assert [int(positions[i]) for i in seen] == list(range(len(seen)))
    return [int(ids[i]) for i in seen]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("one_row", [False, True])
def test_each_trained_token_is_predicted_from_exactly_what_precedes_it(layout, one_row):
    examples = make_examples(5, completions=3)
    if layout == "padded" and one_row:
        pytest.skip("padded rows hold one sequence each")
    rows = arrange(examples, layout, one_row=one_row)
    expected = [
        example.prompt + completion[:t]
        for example in examples
        for completion, trained in zip(example.completions, example.trained, strict=True)
        for t, train in enumerate(trained)
        if train
    ]
    assert [context(rows, p) for p in rows.position] == expected


def test_targets_stand_in_the_order_of_examples_completions_and_positions():
    examples = [
        Example([1], [[5, 6, 7], [8]], [[True, False, True], [True]]),
        Example([2], [[9, 4]], [[True, True]]),
    ]
    batch = collate(examples)
    assert batch.target.tolist() == [5, 7, 8, 9, 4]
    assert batch.sequence.tolist() == [0, 0, 1, 2, 2]
    assert batch.completion.tolist() == [0, 1, 0]
    assert batch.tokens_of(1).tolist() == [False, False, True, False, False]


def test_a_shared_prompt_stands_in_its_row_once():
    example = Example([3, 4, 5], [[6, 7], [8, 9]], [[True, True]] * 2)
    assert arrange([example], "shared").input_ids.tolist() == [[3, 4, 5, 6, 8]]


def test_nothing_after_the_last_predictor_is_computed():
    example = Example([3, 4], [[6, 7, 8, 9]], [[True, True, False, False]])
    assert arrange([example], "padded").input_ids.tolist() == [[3, 4, 6]]


def test_packing_fills_rows_before_it_opens_new_ones():
    examples = [Example([3] * n, [[5]], [[True]]) for n in (2, 6, 4, 3, 1)]
    assert arrange(examples, "packed").input_ids.shape == (3, 6)


def test_unused_slots_hold_a_token_of_the_examples_as_others_may_have_no_embedding():
    rows = arrange(
        [Example([5, 6], [[7, 8, 9]], [[True] * 3]), Example([6], [[7]], [[True]])], "padded"
    )
    assert rows.input_ids.tolist() == [[5, 6, 7, 8], [6, 5, 5, 5]]


def test_packing_puts_each_segment_in_the_first_row_with_room_longest_first():
    draw = random.Random(0)
    for highest in (2, 5, 60) * 10:
        lengths = [draw.randint(1, highest) for _ in range(draw.randint(1, 80))]
        examples = [Example([i + 1] * length, [[0]], [[True]]) for i, length in enumerate(lengths)]
        expected: list[list[int]] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            row = next((row for row in expected if len(row) + lengths[i] <= max(lengths)), None)
            if row is None:
                expected.append(row := [])
            row += examples[i].prompt
        rows = arrange(examples, "packed").input_ids.tolist()
        assert rows == [row + [1] * (max(lengths) - len(row)) for row in expected]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_empty_batch_still_has_a_row_to_compute(layout):
    rows = arrange([], layout)
    assert rows.input_ids.shape == (1, 1)
    assert rows.position.shape == (0,)
    assert rows.position.dtype == torch.int64


def long_examples():
    """Prompts and completions that end within blocks, at their borders, and span several."""
    lengths = [(300, 170, 50, 129, 1), (10, 400, 3), (128, 128, 128), (140, 9)]
    return [
        Example([3] * start, [[4] * n for n in ends], [[True] * n for n in ends])
        for start, *ends in lengths
    ]


@pytest.mark.parametrize("one_row", [False, True])
def test_the_block_mask_of_shared_rows_shows_what_the_dense_one_shows(one_row):
    dense = arrange(long_examples(), "shared", one_row=one_row)
    blocks = arrange(long_examples(), "shared", one_row=one_row, blocks=True).attention_mask
    rows, width = dense.input_ids.shape
    torch.testing.assert_close(
        create_mask(blocks.mask_mod, rows, None, width, width, "cpu"), dense.attention_mask
    )
    # from a dense one, by torch
    expected = create_block_mask(blocks.mask_mod, rows, None, width, width, "cpu")
    for name in ("num_blocks", "indices"):
        for side in ("kv", "full_kv", "q", "full_q"):
            field = f"{side}_{name}"
            torch.testing.assert_close(getattr(blocks, field), getattr(expected, field), msg=field)


def test_no_tensor_of_the_width_squared_is_made_for_a_block_mask():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.elements = max(self.elements, result.numel())
            return result

    example = Example([3] * 1000, [[4] * 900 for _ in range(8)], [[True] * 900] * 8)
    with Largest() as largest:
        width = arrange([example], "shared", blocks=True).input_ids.shape[1]
    assert width > 8000 and largest.elements <= 128 * width


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """FlexAttention as torch defines it, not compiled: its CPU kernels have no backward pass."""
    from torch.nn.attention import flex_attention as module
    from transformers import masking_utils
    from transformers.integrations import flex_attention as integration

    monkeypatch.setattr(module, "_validate_device", lambda query, key, value: None)
    monkeypatch.setattr(
        masking_utils,
        "create_block_mask",
        lambda _compile, **options: create_block_mask(**options),
        raising=False,
    )
    eager = lambda *args, training=False, **options: module.flex_attention(*args, **options)  # noqa: E731
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", eager)


def log_probs_and_gradient(attention, dtype, *, autocast=False, device="cpu"):
    model = make_model("qwen3", attention=attention, dtype=dtype).to(device)
    policy = Policy(model, layout="shared")
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        logprob = policy(collate(make_examples(6, completions=3), device=model.device)).logprob
    logprob.sum().backward()
    return logprob.detach(), torch.cat(
        [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    )


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize(
    ("dtype", "autocast", "error"),
    [(torch.float64, False, 1e-12), (torch.float32, False, 1e-5), (torch.float32, True, 3e-2)],
)
def test_flex_attention_shares_prompts_and_gives_the_numbers_of_sdpa(
    flex_on_cpu, dtype, autocast, error
):
    numbers, expected = (
        log_probs_and_gradient(attention, dtype, autocast=autocast)
        for attention in ("flex_attention", "sdpa")
    )
    for value, wanted in zip(numbers, expected, strict=True):
        assert (value - wanted).norm() <= error * wanted.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_flex_attention_gives_the_numbers_of_sdpa_on_a_gpu():
    numbers, expected = (
        log_probs_and_gradient(attention, torch.float32, device="cuda")
        for attention in ("flex_attention", "sdpa")
    )
    for value, wanted in zip(numbers, expected, strict=True):
        assert (value - wanted).norm() <= 1e-3 * wanted.norm()
