"""Without a GPU Triton's kernels run in its interpreter. Triton asks for that when it is imported, which other
libraries may do first, so it is settled before any test module."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
