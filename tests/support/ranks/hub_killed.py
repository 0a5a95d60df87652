"""A run that is killed in the middle of an upload: when its adapter is on the Hub, and its model is
not.
"""

import os
import signal

from burnish.loops.cli import main
from huggingface_hub import HfApi
from rank_hub import meet


def be_rank(address, words):
    meet(address)
    upload = HfApi.upload_folder

    def upload_and_die(api, **options):
        upload(api, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    HfApi.upload_folder = upload_and_die
    main(["sft", *words])
