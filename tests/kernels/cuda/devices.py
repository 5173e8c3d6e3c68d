"""The device that the tests of CUDA kernels run on: a card, or the CPU in Triton's interpreter."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
