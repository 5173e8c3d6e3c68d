"""A plugin of pytest that hides the library of kernels, as where there was no compiler."""

from pypto_serving.kernels import abi

abi.library = lambda: None
