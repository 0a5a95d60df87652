"""A vision-language model learns to count colored shapes, from scratch, offline, on a CPU.

    python shapes.py runs/shapes

A picture shows discs and squares of three colors in up to nine places; the question is, for one
color, "how many red?". A model of some 400,000 random weights copies the answers to 1,500 pictures
by SFT, and is then told by a reward which of its own answers to other pictures are right (GRPO).
accuracy.json and accuracy.png have the share of right answers, the likeliest ones, to pictures that
it has never seen. Needs matplotlib.
"""

import argparse
import json
import random
import time
from pathlib import Path

import burnish
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPImageProcessorPil,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

COLORS = {"red": (220, 50, 50), "green": (60, 170, 80), "blue": (60, 100, 220)}
CELL = 16  # pixels of a place, of which the model sees each as a token
PLACES = 3  # in a row, and rows
SIDE = CELL * PLACES
WORDS = ["<pad>", "<end>", "<image>", "<unk>", "how", "many", "?", *COLORS, *map(str, range(10))]
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
)


def draw(rng, path):
    """Write a picture; returns the colors of what it shows."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(picture)
    shown = []
    for place in rng.sample(range(PLACES**2), rng.randint(3, PLACES**2)):
        color = rng.choice(list(COLORS))
        shown.append(color)
        size = rng.randint(10, 12)
        left = place % PLACES * CELL + rng.randint(1, CELL - size - 1)
        top = place // PLACES * CELL + rng.randint(1, CELL - size - 1)
        box = (left, top, left + size, top + size)
        rng.choice([pen.ellipse, pen.rectangle])(box, fill=COLORS[color])
    picture.save(path)
    return shown


def write(directory, name, count, rng):
    """Write pictures, and rows with a question about each; returns the file of rows."""
    folder = directory / name
    folder.mkdir(parents=True)
    rows = []
    for number in range(count):
        image = f"{name}-{number}.png"
        shown = draw(rng, folder / image)
        color = rng.choice(shown)  # the answer is 1 at least
        answer = str(shown.count(color))
        row = {
            "images": [image],
            "prompt": [{"role": "user", "content": f"how many {color} ?"}],
            "completion": [{"role": "assistant", "content": answer}],
            "answer": answer,
        }
        rows.append(json.dumps(row) + "\n")
    path = folder / "rows.jsonl"
    path.write_text("".join(rows))
    return str(path)


def save_start(directory, seed):
    """The untrained model, and its processor: a token for each word, and one for each place."""
    torch.manual_seed(seed)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )
    size = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size=size, do_center_crop=False),
        tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": CELL,
        "projection_dim": 64,
    }
    text = {
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": len(WORDS),
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=2,
        image_token_id=2,
        initializer_range=0.1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    model = LlavaForConditionalGeneration(config)
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return sum(weight.numel() for weight in model.parameters())


def curve(directory, metric):
    """The steps of a run at which a metric was measured, and its values."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    measured = {line["step"]: line[metric] for line in lines if metric in line}
    return list(measured), list(measured.values())


def report(directory, **facts):
    """Write accuracy.json and accuracy.png; returns the accuracy before and after GRPO."""
    steps, accuracy = curve(directory / "grpo", "eval/reward")
    found = {"after SFT": accuracy[0], "after GRPO": accuracy[-1]}
    curves = {"steps": steps, "accuracy": accuracy}
    text = json.dumps({**facts, **found, **curves}, indent=2)
    (directory / "accuracy.json").write_text(text + "\n")
    figure = Figure(figsize=(9, 3), layout="constrained")
    shown, held_out, asked = figure.subplots(1, 3)
    rows = (directory / "held_out" / "rows.jsonl").read_text().splitlines()
    row = json.loads(rows[0])
    shown.imshow(Image.open(directory / "held_out" / row["images"][0]))
    shown.set_title(f"{row['prompt'][0]['content']}  {row['answer']}")
    shown.axis("off")
    held_out.plot(steps, [100 * value for value in accuracy], marker=".")
    held_out.set_title("right answers to unseen pictures, %")
    asked.plot(*curve(directory / "grpo", "reward"))
    asked.set_title("reward of sampled answers")
    for axis in (held_out, asked):
        axis.set_xlabel("GRPO step")
        axis.grid(alpha=0.3)
    figure.savefig(directory / "accuracy.png", dpi=100)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--taught", type=int, default=1500, help="pictures whose answers it copies")
    parser.add_argument("--asked", type=int, default=4000, help="pictures that it is asked about")
    parser.add_argument("--held_out", type=int, default=500)
    parser.add_argument("--sft_steps", type=int, default=200)
    parser.add_argument("--grpo_steps", type=int, default=180)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    directory = args.directory
    began = time.time()
    # products are so small that a second thread costs more than it computes
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    held_out = write(directory, "held_out", args.held_out, rng)
    taught = write(directory, "taught", args.taught, rng)
    asked = write(directory, "asked", args.asked, rng)
    weights = save_start(directory / "start", args.seed)
    burnish.sft(
        str(directory / "start"),
        taught,
        str(directory / "sft"),
        steps=args.sft_steps,
        batch_size=64,
        learning_rate=2e-3,
        schedule="cosine",
        warmup=0.05,
        seed=args.seed,
    ).train()
    burnish.grpo(
        str(directory / "sft" / "model"),
        asked,
        str(directory / "grpo"),
        held_out,
        rewards={"exact_match": 1.0},
        steps=args.grpo_steps,
        prompts_per_rollout=32,
        group_size=8,
        max_tokens=3,
        learning_rate=2e-4,
        schedule="linear",
        warmup=0.1,
        eval_every=max(1, args.grpo_steps // 12),
        show_every=0,
        seed=args.seed,
    ).train()
    found = report(directory, weights=weights, seconds=round(time.time() - began))
    print(", ".join(f"{stage} {value:.1%}" for stage, value in found.items()))


if __name__ == "__main__":
    main()
