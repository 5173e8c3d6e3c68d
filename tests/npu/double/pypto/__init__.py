"""A double of hw-native-sys/pypto: its interface and rules as docs/npu.md lists them, with kernels in numpy.

`PYPTO_DOUBLE_REVISION` chooses 2026-06, the default, or 2026-08. `PYPTO_DOUBLE_FAULTS` names a file whose
lines are faults (`init`, `fail`, `hang` or `die`), each with the number of a worker's dispatch at which it happens, one
behind the other; a line is removed then.

It stands below the backend: a mock of that would prove nothing about forks, shared memory and calls that never return.
"""

import os

__version__ = "0.1.0"
REVISION = os.environ.get("PYPTO_DOUBLE_REVISION", "2026-06")
