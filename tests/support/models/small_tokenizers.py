"""Small tokenizers that differ: trained on a few lines, or of letters and pairs of letters."""

import random

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "the cats sat on the mat, and the rats sat on the hats",
    "  spaces   and\n\nlines\tand tabs ",
    "größer naïve café, 日本語のテキスト 日本, и русский текст",
    "emoji 🙂🙃 and 👩‍👩‍👧‍👦 families 🇩🇪",
]


def on_bytes(vocabulary, *, lower=False, eos="<end>"):
    """BPE on bytes; 258 tokens have no merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if lower:
        tokenizer.normalizer = normalizers.Lowercase()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)


def like_sentencepiece(vocabulary, *, eos="</s>"):
    """BPE on characters, with a token for a space, and bytes for characters that it lacks."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<s>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", eos, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos)


def of_letters(size, seed):
    """``size`` tokens: three special ones, 20 letters, and pairs of them that the seed draws."""
    letters = "abcdefghijklmnopqrst"
    draw = random.Random(seed)
    merges = draw.sample([(a, b) for a in letters for b in letters], size - 3 - len(letters))
    tokens = ["<pad>", "<s>", "</s>", *letters, *(a + b for a, b in merges)]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
