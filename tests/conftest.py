"""Before anything imports Triton: without a GPU its kernels run in the interpreter, on the CPU."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
