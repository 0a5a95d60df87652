"""Small random vision-language models of several families, with their processors, and pictures."""

import copy
import importlib.util

import pytest
import torch
import transformers
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_SPECIAL = [
    "<pad>", "<bos>", "<eos>", "<|start|>", "<|end|>", "<image>", "<video>", "<|image_pad|>",
    "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<fake_token_around_image>",
    "<end_of_utterance>", "<global-img>", "<start_of_image>", "<image_soft_token>",
    "<end_of_image>", "<img>", "</img>", "<IMG_CONTEXT>", "<|image|>", "<|video|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)),
]  # fmt: skip
VOCABULARY = {token: i for i, token in enumerate([*_SPECIAL, *_BYTES])}

# What each family's template writes where a message shows an image.
_SHOWN = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "internvl": "<IMG_CONTEXT>\n",
    "glm4v": "<|begin_of_image|><|image|><|end_of_image|>",
}


def template(shown="<image>"):
    """A chat template that takes texts and parts, and writes ``shown`` for an image."""
    return (
        "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{% if p.type == 'image' %}" + shown + "{% else %}"
        "{{ p.text }}{% endif %}{% endfor %}{% endif %}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )


def make_tokenizer(**tokens):
    """A tokenizer of bytes with the special tokens of all families; ``tokens`` are named ones."""
    core = Tokenizer(models.BPE(VOCABULARY, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|end|>",
        extra_special_tokens=tokens,
    )


_TEXT = dict(
    vocab_size=len(VOCABULARY),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=2048,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=VOCABULARY["<|end|>"],
)
_CLIP = dict(
    model_type="clip_vision_model",
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    image_size=28,
    patch_size=14,
    projection_dim=32,
)
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model"}
_IDS = {
    "image_token_id": VOCABULARY["<|image_pad|>"],
    "video_token_id": VOCABULARY["<|video_pad|>"],
    "vision_start_token_id": VOCABULARY["<|vision_start|>"],
    "vision_end_token_id": VOCABULARY["<|vision_end|>"],
}
_ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}


def _idefics3(kind="Idefics3"):
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                  image_size=32, patch_size=8)  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(
        vision_config=vision,
        text_config={"model_type": "llama", **_TEXT},
        scale_factor=2,
        image_token_id=VOCABULARY["<image>"],
        pad_token_id=0,
    )
    sizes = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
    images = _image_processor(kind, **sizes)
    if kind == "Idefics3":
        return config, transformers.Idefics3Processor(images, make_tokenizer(), image_seq_len=4)
    videos = transformers.SmolVLMVideoProcessor(**sizes)
    return config, transformers.SmolVLMProcessor(images, make_tokenizer(), videos, image_seq_len=4)


def _image_processor(kind, **settings):
    """An image processor; without torchvision, the one that needs none."""
    name = f"{kind}ImageProcessor{'' if HAS_TORCHVISION else 'Pil'}"
    return getattr(transformers, name)(**settings)


def _llava():
    config = transformers.LlavaConfig(
        vision_config=_CLIP,
        text_config={"model_type": "llama", **_TEXT},
        image_token_index=VOCABULARY["<image>"],
        image_token_id=VOCABULARY["<image>"],
        vision_feature_select_strategy="default",
        vision_feature_layer=-2,
    )
    size = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    images = _image_processor("CLIP", **size)
    processor = transformers.LlavaProcessor(
        images,
        make_tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def _llava_next():
    grids = [[28, 56], [56, 28], [56, 56]]
    config = transformers.LlavaNextConfig(
        vision_config=_CLIP,
        text_config={"model_type": "llama", **_TEXT},
        image_token_index=VOCABULARY["<image>"],
        image_token_id=VOCABULARY["<image>"],
        image_grid_pinpoints=grids,
        vision_feature_select_strategy="default",
    )
    images = _image_processor(
        "LlavaNext",
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=grids,
    )
    processor = transformers.LlavaNextProcessor(
        images,
        make_tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def _llava_onevision():
    grids = [[28, 28], [28, 56], [56, 28], [56, 56]]
    config = transformers.LlavaOnevisionConfig(
        vision_config=_SIGLIP,
        text_config={"model_type": "qwen2", **_TEXT},
        image_token_id=VOCABULARY["<image>"],
        image_token_index=VOCABULARY["<image>"],
        video_token_id=VOCABULARY["<video>"],
        video_token_index=VOCABULARY["<video>"],
        image_grid_pinpoints=grids,
        vision_feature_layer=-1,
    )
    images = transformers.LlavaOnevisionImageProcessor(
        size={"height": 28, "width": 28}, image_grid_pinpoints=grids
    )
    videos = transformers.LlavaOnevisionVideoProcessor(size={"height": 28, "width": 28})
    processor = transformers.LlavaOnevisionProcessor(
        images,
        make_tokenizer(),
        videos,
        num_image_tokens=4,
        vision_feature_select_strategy="full",
    )
    return config, processor


def _gemma3():
    kinds = ["sliding_attention", "full_attention"]
    text = {**_TEXT, "sliding_window": 24, "query_pre_attn_scalar": 8, "layer_types": kinds}
    config = transformers.Gemma3Config(
        vision_config={**_SIGLIP, "num_hidden_layers": 2},
        text_config=text,
        mm_tokens_per_image=4,
        boi_token_index=VOCABULARY["<start_of_image>"],
        eoi_token_index=VOCABULARY["<end_of_image>"],
        image_token_index=VOCABULARY["<image_soft_token>"],
        image_token_id=VOCABULARY["<image_soft_token>"],
    )
    tokenizer = make_tokenizer(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    images = _image_processor("Gemma3", size={"height": 28, "width": 28})
    return config, transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)


def _qwen(kind, vision):
    config = getattr(transformers, f"{kind}Config")(
        vision_config={
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
        text_config={**_TEXT, "rope_parameters": _ROPE},
        **_IDS,
    )
    images = transformers.Qwen2VLImageProcessor(
        patch_size=4, merge_size=2, size={"shortest_edge": 256, "longest_edge": 1024}
    )
    if kind == "Qwen3VL":
        videos = transformers.Qwen3VLVideoProcessor(patch_size=4, merge_size=2)
        return config, transformers.Qwen3VLProcessor(images, make_tokenizer(), videos)
    videos = transformers.Qwen2VLVideoProcessor(patch_size=4, merge_size=2)
    of_kind = "Qwen2_5_VLProcessor" if kind == "Qwen2_5_VL" else "Qwen2VLProcessor"
    return config, getattr(transformers, of_kind)(images, make_tokenizer(), videos)


def _qwen2_vl():
    return _qwen("Qwen2VL", dict(depth=2, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2))


def _qwen2_5_vl():
    return _qwen("Qwen2_5_VL", dict(depth=2, hidden_size=16, num_heads=2, intermediate_size=24,
                 out_hidden_size=32, window_size=16, fullatt_block_indexes=[1]))  # fmt: skip


def _qwen3_vl():
    return _qwen("Qwen3VL", dict(depth=2, hidden_size=16, num_heads=2, intermediate_size=24,
                 out_hidden_size=32, num_position_embeddings=64, deepstack_visual_indexes=[0]))  # fmt: skip


def _glm4v():
    config = transformers.Glm4vConfig(
        vision_config=dict(depth=2, hidden_size=16, num_heads=2, intermediate_size=24, patch_size=4,
                           out_hidden_size=32, image_size=32, spatial_merge_size=2),
        text_config={**_TEXT, "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}},
        image_token_id=VOCABULARY["<|image|>"],
        video_token_id=VOCABULARY["<|video|>"],
        image_start_token_id=VOCABULARY["<|begin_of_image|>"],
        image_end_token_id=VOCABULARY["<|end_of_image|>"],
        video_start_token_id=VOCABULARY["<|begin_of_video|>"],
        video_end_token_id=VOCABULARY["<|end_of_video|>"],
    )  # fmt: skip
    images = transformers.Glm4vImageProcessor(
        patch_size=4, merge_size=2, size={"shortest_edge": 512, "longest_edge": 2048}
    )
    videos = transformers.Glm4vVideoProcessor(patch_size=4, merge_size=2)
    return config, transformers.Glm4vProcessor(images, make_tokenizer(), videos)


def _internvl():
    config = transformers.InternVLConfig(
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                           num_attention_heads=4, image_size=[32, 32], patch_size=[8, 8]),
        text_config={"model_type": "qwen2", **_TEXT},
        image_token_id=VOCABULARY["<IMG_CONTEXT>"],
        downsample_ratio=0.5,
        image_seq_length=4,
    )  # fmt: skip
    tokenizer = make_tokenizer(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    images = transformers.GotOcr2ImageProcessor(size={"height": 32, "width": 32}, max_patches=4)
    videos = transformers.InternVLVideoProcessor(size={"height": 32, "width": 32})
    processor = transformers.InternVLProcessor(images, tokenizer, videos, image_seq_length=4)
    return config, processor


FAMILIES = {
    "idefics3": _idefics3,
    "llava": _llava,
    "llava_next": _llava_next,
    "gemma3": _gemma3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": lambda: _idefics3("SmolVLM"),
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "glm4v": _glm4v,
}
WITHOUT_TORCHVISION = ("idefics3", "llava", "llava_next", "gemma3")


def skip_unless_available(family):
    """Skip a test of a family whose processor needs a package that is not installed."""
    if family in WITHOUT_TORCHVISION:
        return
    if not HAS_TORCHVISION:
        pytest.skip("its processor needs torchvision, which is not installed")
    if family == "smolvlm" and importlib.util.find_spec("num2words") is None:
        pytest.skip("its processor needs num2words, which is not installed")


def make(family, *, dtype=torch.float64, attention="sdpa", seed=0):
    """A small random model of a family and its processor.

    Families whose processors read videos need torchvision.
    """
    torch.manual_seed(seed)
    config, processor = FAMILIES[family]()
    shown = _SHOWN.get("qwen" if family.startswith("qwen") else family, "<image>")
    processor.chat_template = processor.tokenizer.chat_template = template(shown)
    model = AutoModelForImageTextToText.from_config(
        copy.deepcopy(config), attn_implementation=attention, dtype=dtype
    )
    # far from uniform, so that a wrong mask, position or image changes the numbers
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():  # Gemma 3 begins blind
                parameter.normal_(std=0.02)
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model.eval(), processor


def save(directory, family, *, dtype=torch.float32, seed=0):
    """A small model and its processor on disk; returns the directory."""
    model, processor = make(family, dtype=dtype, seed=seed)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


def picture(width=40, height=40, color="red", mode="RGB"):
    """A colored picture with a black disc, so that no two of unlike sizes or colors look alike."""
    image = Image.new("RGB", (width, height), color)
    if min(width, height) > 8:
        ImageDraw.Draw(image).ellipse((2, 2, width // 2, height // 2), fill="black")
    return image if mode == "RGB" else image.convert(mode)
