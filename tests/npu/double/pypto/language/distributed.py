"""Windows, which kernels in numpy do not need: they get the function `exchange`."""

from pypto.language import Tensor as DistributedTensor

__all__ = ["DistributedTensor"]
