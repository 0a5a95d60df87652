"""Small tokenizers and chat templates that need no download, and the real ones where they are
installed.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from types import ModuleType

import datasets
import pytest
from burnish.benchmarks import real_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "markers": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # As Qwen3: what precedes </think> is rendered in the last answer only.
    "forgets_thinking": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # Tools and their calls; the reasoning in `thought` is never written.
    "tools": (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "no_end": (
        "{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    ),
}
SPECIAL = [
    *(
        "<bos>",
        "<eos>",
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    *("<start_of_turn>", "<end_of_turn>"),
]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    datasets.disable_progress_bars()


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """One token per byte, and " b" one token of its own, so that tokens can merge over an edge."""

    def build(
        template: str | None = "chatml",
        *,
        adds_bos: bool = False,
        merged: str = "Ġb",
        **special: str,
    ) -> PreTrainedTokenizerFast:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*alphabet, merged])}
        core = Tokenizer(models.BPE(vocab=vocabulary, merges=[(merged[0], merged[1])]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=merged == "Ġb"
        )
        if merged != "Ġb":
            lines = pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)|\s+|\w+"), "isolated")
            core.pre_tokenizer = pre_tokenizers.Sequence([lines, core.pre_tokenizer])
        core.decoder = decoders.ByteLevel()
        core.add_special_tokens(SPECIAL)
        if adds_bos:
            bos = ("<bos>", core.token_to_id("<bos>"))
            core.post_processor = processors.TemplateProcessing(
                single="<bos> $A", special_tokens=[bos]
            )
        special = {"bos_token": "<bos>", "eos_token": "<eos>"} | special
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, **{k: v for k, v in special.items() if v}
        )
        tokenizer.chat_template = template and TEMPLATES[template]
        return tokenizer

    return build


@pytest.fixture(scope="session")
def smollm2() -> PreTrainedTokenizerBase:
    """The tokenizer and chat template of SmolLM2-135M-Instruct."""
    try:
        return AutoTokenizer.from_pretrained(real_model.smollm2())
    except real_model.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def trl() -> ModuleType:
    """The peer, whose own functions say what its tokens are."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("the package trl is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (
            "trl.data_utils",
            "trl.trainer.dpo_trainer",
            "trl.trainer.kto_trainer",
            "trl.trainer.sft_trainer",
        ):
            importlib.import_module(name)
    return importlib.import_module("trl")
