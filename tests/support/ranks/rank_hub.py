"""A rank of a run from the command line that uploads its model to a stand-in for the Hub."""

import os

import huggingface_hub
from burnish.loops.cli import main
from hub_fake import TOKEN


def meet(address):
    """Have the library of this process call this Hub."""
    huggingface_hub.constants.ENDPOINT = address
    huggingface_hub.constants.HF_HUB_DISABLE_XET = True
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    os.environ["HF_TOKEN"] = TOKEN


def be_rank(address, words):
    meet(address)
    if status := main(["sft", *words]):
        raise SystemExit(status)
