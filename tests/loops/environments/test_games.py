"""The guessing game: optimal play is known, reached by the middle, and rewarded by 1."""

import asyncio
import functools

import pytest
from burnish.loops.environments import MultiTurnSource
from burnish.loops.environments.games import GuessNumber, guess_rows, optimal_guesses


def play(game, said, row, strategy):
    """The game's reward and number of guesses; the strategy narrows what is left."""
    game.reset(row)
    low, high, reward = row["low"], row["high"], 0.0
    for guesses in range(1, 1000):
        guess = strategy(low, high)
        step = game.step(said(f"I say {guess}"))
        reward += step.reward
        if step.done:
            return reward, guesses
        low, high = (guess + 1, high) if step.observation == "higher" else (low, guess - 1)
    raise AssertionError("the game never ends")


def games(low, high):
    return [
        {"prompt": [], "low": low, "high": high, "secret": secret}
        for secret in range(low, high + 1)
    ]


@pytest.mark.parametrize("numbers", [1, 2, 3, 4, 7, 8, 31, 32, 100])
def test_asking_for_the_middle_always_earns_1(numbers, said):
    found = [
        play(GuessNumber(), said, row, lambda low, high: (low + high) // 2)
        for row in games(5, 4 + numbers)
    ]
    assert {reward for reward, _ in found} == {1.0}
    assert max(guesses for _, guesses in found) == optimal_guesses(numbers)


def test_nothing_does_better_than_the_optimum():
    @functools.cache
    def worst_case(numbers):
        if numbers == 0:
            return 0
        return 1 + min(
            max(worst_case(below), worst_case(numbers - 1 - below)) for below in range(numbers)
        )

    assert [optimal_guesses(n) for n in range(70)] == [worst_case(n) for n in range(70)]


def test_worse_play_earns_less(said):
    (row,) = [row for row in games(1, 15) if row["secret"] == 6]
    assert play(GuessNumber(), said, row, lambda low, high: low) == (pytest.approx(4 / 6), 6)


def test_a_game_that_is_not_won_earns_0(said):
    reward, guesses = play(GuessNumber(guesses=2.0), said, games(1, 100)[-1], lambda low, high: low)
    assert reward == 0.0 and guesses == 14  # twice the seven that are enough


def test_what_is_no_guess_is_wasted(said):
    game = GuessNumber()
    game.reset(games(1, 100)[41])
    for text in ("", "no idea", "0", "101", "9" * 50):
        step = game.step(said(text))
        assert (
            step.observation == "Say a whole number from 1 to 100."
            and step.reward == 0.0
            and step.counts == {"wasted": 1}
        )
    assert game.step(said("Not 7 but 42.")).reward == 1.0  # the sixth of seven


def test_the_row_decides_the_game_and_rows_differ_by_seed():
    rows = guess_rows(50, low=1, high=20, seed=1)
    assert rows == guess_rows(50, low=1, high=20, seed=1) != guess_rows(50, low=1, high=20, seed=2)
    assert {1, 20} <= {row["secret"] for row in rows} <= set(range(1, 21))
    assert "from 1 to 20" in rows[0]["prompt"][0]["content"]


def test_a_game_in_tokens(tokenizer, turns, scripted, request_for):
    row = guess_rows(1, low=1, high=7, seed=0)[0] | {"secret": 3}
    source = scripted(tokenizer, ["4", "2", "3"])
    conversations = MultiTurnSource(source, GuessNumber, lambda task: row, turns)
    (sample,) = asyncio.run(conversations.sample(request_for()))
    assert (
        sample.finish == "stop"
        and sample.info["environment_reward"] == 1.0
        and sample.info["won"] == 1
    )
    assert [m["content"] for m in sample.info["messages"]] == ["4", "lower", "2", "higher", "3"]


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(
        ValueError,
        match=r"guess_number: guesses must be >= 1, so that the game can be won, got 0.5",
    ):
        GuessNumber(guesses=0.5)
    with pytest.raises(ValueError, match="guess_rows: wanted low <= high, got 2 and 1"):
        guess_rows(1, low=2, high=1)
