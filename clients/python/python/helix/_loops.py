"""Event loops and the bridges that wake them. Imported with the first call that has to wait."""

import asyncio
from weakref import WeakKeyDictionary

from ._helix import LoopBridge

_bridges: "WeakKeyDictionary[asyncio.AbstractEventLoop, LoopBridge]" = WeakKeyDictionary()


def running() -> tuple[asyncio.AbstractEventLoop, LoopBridge]:
    """Returns the running event loop and its bridge.

    Raises RuntimeError outside of an event loop.
    """
    loop = asyncio.get_running_loop()
    bridge = _bridges.get(loop)
    if bridge is None:
        bridge = LoopBridge()
        loop.add_reader(bridge.fileno(), bridge.drain)
        _bridges[loop] = bridge
    return loop, bridge
