import pytest
from burnish.data import DataError, check_same_vocabulary


def test_a_tokenizer_has_the_vocabulary_of_its_copy(byte_tokenizer) -> None:
    check_same_vocabulary(byte_tokenizer(), byte_tokenizer("llama3", adds_bos=True))


def test_tokens_that_only_one_of_them_has_are_not_compared(byte_tokenizer) -> None:
    larger = byte_tokenizer()
    larger.add_tokens(["four", "five"])
    check_same_vocabulary(byte_tokenizer(), larger)
    check_same_vocabulary(larger, byte_tokenizer())


def test_the_first_token_that_differs_is_named_with_both_meanings(byte_tokenizer) -> None:
    student, teacher = byte_tokenizer(), byte_tokenizer()
    student.add_tokens(["same", "four", "five"])
    teacher.add_tokens(["same", "five", "four"])
    index = student.convert_tokens_to_ids("four")
    with pytest.raises(
        DataError,
        match=rf"^teacher: token {index} is 'five', and 'four' for the student, .*; choose a",
    ):
        check_same_vocabulary(student, teacher)


def test_two_real_tokenizers_are_told_apart(smollm2, byte_tokenizer) -> None:
    check_same_vocabulary(smollm2, smollm2)
    with pytest.raises(
        DataError, match=r"^teacher: token 0 is '!', and '<\|endoftext\|>' for the student"
    ):
        check_same_vocabulary(smollm2, byte_tokenizer())
