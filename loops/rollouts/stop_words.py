"""Words that end a completion, whichever tokens they are made of."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase


class StopWords:
    """Looks for words in the text of a completion, as its tokens come in.

    The completion ends with the token that completes a word, which stays a part of it: all of its
    tokens were drawn, and are trained. Special tokens are no text.

    Args:
        tokenizer: of the model.
        words: with a character at least.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.words = tuple(words)
        self._special = frozenset(tokenizer.all_special_ids)
        # A token of text has a byte at least. One more comes before, as some tokenizers leave a
        # blank out at the beginning of a text.
        self._window = max((len(word.encode()) for word in words), default=0) + 1

    def ended(self, tokens: Sequence[int]) -> bool:
        """True if the last of these tokens completes a word; no earlier one did."""
        if not self.words or tokens[-1] in self._special:
            return False
        recent: list[int] = []
        for token in reversed(tokens):
            if token not in self._special:
                recent.append(token)
            if len(recent) == self._window:
                break
        text = self.tokenizer.decode(recent[::-1], clean_up_tokenization_spaces=False)
        return any(word in text for word in self.words)

    def end(self, tokens: Sequence[int]) -> int | None:
        """How many tokens there are up to the first word; None if there is no word."""
        for count in range(1, len(tokens) + 1):
            if self.ended(tokens[:count]):
                return count
        return None


def stop_words(tokenizer: PreTrainedTokenizerBase | None, words: tuple[str, ...]) -> StopWords:
    """Raises ValueError if there are words and no tokenizer."""
    if tokenizer is None:
        raise ValueError(
            f"stop_words: without a tokenizer there is no text to find {words[0]!r} in; give the source its tokenizer"
        )
    return StopWords(tokenizer, words)
