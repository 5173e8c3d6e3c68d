"""Tell the service manager, such as systemd, how the server is; see sd_notify(3) and sd_watchdog_enabled(3)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable

from pypto_serving.engine.client import Health

logger = logging.getLogger("pypto_serving.api")

PATIENCE_S = 1.0
PETS = 2
"""Signs of life in the time that the service manager waits for one."""


def tell(state: str, patience_s: float = PATIENCE_S) -> None:
    """Send a line such as READY=1 to the service manager, if there is one and it takes it within `patience_s`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    path = "\0" + address[1:] if address[0] == "@" else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(patience_s)
            sender.sendto(state.encode(), path)
    except OSError as error:
        logger.warning("the service manager at %s cannot be told %s: %s", address, state, error)


async def pet_watchdog(health: Callable[[], Health]) -> None:
    """Send signs of life while the engine core gives some, if the service manager waits for them."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    try:
        wait_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    except ValueError:
        return
    while wait_s > 0:
        if health().status not in ("silent", "dead"):
            tell("WATCHDOG=1", 0)  # a manager that reads nothing must not stop the event loop
        await asyncio.sleep(wait_s / PETS)
