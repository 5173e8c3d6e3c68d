"""How torch's threads wait for work. Import before torch: OpenMP reads this once, when torch loads it.

By default idle threads spin. Where another process wants the same cores, spinning threads eat each other's time
slices, and a step that takes 100 ms takes seconds. Sleeping costs some ten microseconds per parallel operation.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
