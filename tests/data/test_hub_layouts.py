"""Datasets that many train on, in the columns and types they have on the Hub: what of them is
trained.
"""

import json

import pytest
from burnish.data import (
    encode_preference,
    encode_prompts,
    encode_scores,
    encode_stepwise,
    encode_supervised,
    encode_unpaired,
    example,
    load_data,
)
from datasets import Dataset, DatasetDict

ASK = {"role": "user", "content": "Which is the largest?"}
ANSWER = {"role": "assistant", "content": "Jupiter."}
WRONG = {"role": "assistant", "content": "Earth."}
AGAIN = {"role": "user", "content": "And the smallest?"}
LAST = {"role": "assistant", "content": "Mercury."}
END = "<|im_end|>"

ULTRACHAT = {"prompt": ASK["content"], "prompt_id": "f0e3", "messages": [ASK, ANSWER, AGAIN, LAST]}
ULTRAFEEDBACK = {
    "prompt": ASK["content"],
    "prompt_id": "af13",
    "chosen": [ASK, ANSWER],
    "rejected": [ASK, WRONG],
    "messages": [ASK, ANSWER],
    "score_chosen": 8.5,
    "score_rejected": 3.0,
}
HH = {
    "chosen": "\n\nHuman: Which is the largest?\n\nAssistant: Jupiter.",
    "rejected": "\n\nHuman: Which is the largest?\n\nAssistant: Earth.",
}
ALPACA = {
    "instruction": "Add the numbers.",
    "input": "2, 3",
    "output": "5",
    "text": "Below is an instruction ...",
}
OPENHERMES = {
    "conversations": [
        {"from": "system", "value": "Be brief.", "weight": None},
        {"from": "human", "value": "Which is the largest?", "weight": None},
        {"from": "gpt", "value": "Jupiter.", "weight": None},
    ],
    "source": "airoboros2.2",
    "category": "orca",
    "skip_prompt_formatting": None,
    "idx": None,
}
NO_ROBOTS = {
    "prompt": ASK["content"],
    "prompt_id": "1d9e",
    "messages": [ASK, ANSWER],
    "category": "Open QA",
}
ORCA = {
    "system": "You are concise.",
    "question": "Which is the largest?",
    "chosen": "Jupiter.",
    "rejected": "Earth.",
}
PRM800K = {
    "prompt": "What is 2 + 3 + 4?",
    "completions": ["2 + 3 = 5.", "5 + 4 = 8."],
    "labels": [True, False],
}
GSM8K = {"question": "What is 2 + 3?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
OPENR1 = {
    "problem": "What is 2 + 3?",
    "solution": "It is $5$.",
    "answer": "5",
    "problem_type": "Algebra",
    "generations": ["<think>2 + 3</think>5"],
    "is_reasoning_complete": [True],
    "messages": [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "<think>2 + 3</think>5"},
    ],
}
PROMPT = {"problem": "prompt"}
CALL = {"name": "weather", "arguments": {"city": "Rome"}}
SCHEMA = {"name": "weather", "parameters": {"city": {"type": "str"}}}
APIGEN = {
    "conversations": [
        {"from": "human", "value": "Weather in Rome?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": '{"sky": "clear"}'},
        {"from": "gpt", "value": "Clear."},
    ],
    "tools": json.dumps([SCHEMA]),
    "system": "# Policy",
}
TOUCAN = {
    "uuid": "7c",
    "messages": json.dumps(
        [
            ASK,
            {"role": "assistant", "content": "", "function_call": CALL},
            {"role": "function", "content": "1"},
            ANSWER,
        ]
    ),
    "tools": json.dumps([SCHEMA]),
}
TOOLACE = {
    "system": "You may call [weather].",
    "conversations": [
        {"from": "user", "value": "Weather?"},
        {"from": "assistant", "value": "[weather(city='Rome')]"},
    ],
}
DOLLY = {"instruction": "Add.", "context": "2, 3", "response": "5", "category": "closed_qa"}
HELPSTEER = {
    "prompt": ASK["content"],
    "response": "Jupiter.",
    "helpfulness": 3,
    "correctness": 4,
    "verbosity": 1,
}
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve 2 + 3.", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "5", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a"},
}
TULU_PAIR = {
    "prompt": "And the smallest?",
    "chosen": [ASK, ANSWER, AGAIN, LAST],
    "rejected": [ASK, ANSWER, AGAIN, WRONG],
}
KTO_MIX = {"prompt": [ASK], "completion": [ANSWER], "label": True}
SYSTEM = {"system": "system_prompt"}

LAYOUTS = {  # row, settings of the part, how it is encoded, the trained text of each completion
    "ultrachat_200k": (
        ULTRACHAT,
        {"split": "train_sft"},
        encode_supervised,
        [f"Jupiter.{END}Mercury.{END}"],
    ),
    "ultrafeedback_binarized": (
        ULTRAFEEDBACK,
        {"split": "train_prefs"},
        encode_preference,
        [f"Jupiter.{END}\n", f"Earth.{END}\n"],
    ),
    "hh-rlhf": (HH, {}, encode_preference, [" Jupiter.<eos>", " Earth.<eos>"]),
    "hh-rlhf, one by one": (HH, {}, encode_unpaired, [" Jupiter.<eos>"]),
    "alpaca": (
        ALPACA,
        {
            "columns": {"instruction": "prompt", "input": "prompt", "output": "completion"},
            "system_prompt": "",
        },
        encode_supervised,
        [f"5{END}\n"],
    ),
    "OpenHermes-2.5": (OPENHERMES, {}, encode_supervised, [f"Jupiter.{END}"]),
    "no_robots": (NO_ROBOTS, {"split": "train[:1]"}, encode_supervised, [f"Jupiter.{END}"]),
    "orca_dpo_pairs": (
        ORCA,
        {"columns": {"question": "prompt", **SYSTEM}, "system_prompt": ""},
        encode_preference,
        [f"Jupiter.{END}\n", f"Earth.{END}\n"],
    ),
    "prm800k": (PRM800K, {}, encode_stepwise, ["\n\n"]),
    "gsm8k": (
        GSM8K,
        {"columns": {"question": "prompt", "answer": "completion"}},
        encode_supervised,
        [f"{GSM8K['answer']}<eos>"],
    ),
    "openr1-math": (OPENR1, {}, encode_supervised, [f"<think>2 + 3</think>5{END}"]),
    "APIGen-MT-5k": (
        APIGEN,
        {"columns": SYSTEM},
        encode_supervised,
        [f"{json.dumps(CALL)}{END}Clear.{END}"],
    ),
    "Toucan-1.5M": (TOUCAN, {}, encode_supervised, [f"{json.dumps(CALL)}{END}Jupiter.{END}"]),
    "ToolACE": (TOOLACE, {"columns": SYSTEM}, encode_supervised, [f"[weather(city='Rome')]{END}"]),
    "dolly-15k": (
        DOLLY,
        {"columns": {"instruction": "prompt", "context": "prompt", "response": "completion"}},
        encode_supervised,
        ["5<eos>"],
    ),
    "HelpSteer2": (
        HELPSTEER,
        {"columns": {"response": "completion", "helpfulness": "score"}, "system_prompt": ""},
        encode_scores,
        [f"Jupiter.{END}\n"],
    ),
    "tulu-3 preference mixture": (
        TULU_PAIR,
        {},
        encode_preference,
        [f"Mercury.{END}\n", f"Earth.{END}\n"],
    ),
    "kto-mix-14k": (KTO_MIX, {}, encode_unpaired, [f"Jupiter.{END}\n"]),
    "DAPO-Math-17k": (
        DAPO,
        {"columns": {"reward_model.ground_truth": "answer"}},
        encode_prompts,
        [],
    ),
    "openr1-math, sampled": (
        OPENR1,
        {"columns": PROMPT, "system_prompt": "Think."},
        encode_prompts,
        [],
    ),
}


@pytest.mark.parametrize("stored", ["saved", "parquet", "jsonl"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dataset_of_the_hub_is_trained_as_it_is(name, stored, tmp_path, byte_tokenizer) -> None:
    row, settings, encode, expected = LAYOUTS[name]
    split = settings.get("split", "train").partition("[")[0]
    if stored == "saved":
        path = tmp_path / "saved"
        DatasetDict(
            {split: Dataset.from_list([row] * 2), "test": Dataset.from_list([row])}
        ).save_to_disk(str(path))
    else:
        path = tmp_path / f"a.{stored}"
        settings = {key: value for key, value in settings.items() if key != "split"}
        Dataset.from_list([row] * 2).to_parquet(path) if stored == "parquet" else path.write_text(
            f"{json.dumps(row)}\n"
        )
    tokenizer = byte_tokenizer("tools" if "tools" in row else "chatml")
    records = load_data({"path": str(path), **settings})[0]
    encoded, account = encode(records, tokenizer)
    prompt, completions, trained, _ = example(encoded, 0)
    texts = [
        tokenizer.decode([token for token, train in zip(ids, mask, strict=True) if train])
        for ids, mask in zip(completions, trained, strict=True)
    ]
    assert texts == expected
    assert account.kept == account.read and not account.skipped
    if system := settings.get("system_prompt") or ("system" in row and row["system"]):
        assert f"<|im_start|>system\n{system}" in tokenizer.decode(prompt)
    if row is DAPO:
        assert records[0].dataset["answer"][:] == ["5"] * account.read


def test_alpaca_without_names_for_its_columns_is_trained_on_its_text_and_says_so(
    byte_tokenizer,
) -> None:
    _, account = encode_supervised([ALPACA], byte_tokenizer())
    assert account.unused == ("instruction", "input", "output")
