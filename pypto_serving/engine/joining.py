"""Keep a host joined to the serving host, with a new process for each life of their replica."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable

from pypto_serving.errors import FINAL_ERRORS, EngineDeadError
from pypto_serving.processes import Child, ChildFault, start_module
from pypto_serving.types.start import JOINED, HostJoin

log = logging.getLogger(__name__)

MODULE = "pypto_serving.backend.ranks.joining_host"
AGAIN_S = 1.0


def join_again(start: HostJoin, joined: Callable[[], None]) -> None:
    """Join for one life after the other, and call `joined` in each.

    Raises ConfigError or ModelError, and EngineDeadError if no process can be started.
    """
    while True:
        try:
            child = start_module(MODULE, start)
        except OSError as error:
            raise EngineDeadError(f"the process that joins {start.address} cannot be started ({error})") from None
        try:
            fault = _live(child, joined)
        finally:
            code = child.end(0)
        if fault is not None and fault.exit_code in FINAL_ERRORS:
            raise FINAL_ERRORS[fault.exit_code](fault.message)
        log.warning("left %s: %s; joining again", start.address, fault.message if fault else f"exit code {code}")
        time.sleep(AGAIN_S)


def _live(child: Child, joined: Callable[[], None]) -> ChildFault | None:
    """Wait for the end of a life, and return its fault."""
    fault, poller = None, select.poll()
    poller.register(child.pipe, select.POLLIN)
    while not child.gone:
        poller.poll()
        for message in child.messages():
            if isinstance(message, ChildFault):
                fault = message
            elif message.phase == JOINED:
                joined()
    return fault
