"""Add tokens to a tokenizer, embeddings for them to the model, and train both.

python new_tokens.py MODEL DATA OUTPUT        completions hold <next> and the digit that follows
"""

import sys

import burnish
from transformers import AutoModelForCausalLM, AutoTokenizer

name, data, output = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
tokenizer.add_tokens(["<next>"])
model.resize_token_embeddings(len(tokenizer))
run = burnish.sft(
    model, data, output, tokenizer=tokenizer, steps=60, batch_size=32, learning_rate=2e-3
)
print(f"loss {run.train()['loss']:.3f}, {model.config.vocab_size} embeddings, in {output}/model")
