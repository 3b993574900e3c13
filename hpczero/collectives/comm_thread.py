"""The one thread that communicates while others compute.

Collectives with `blocking=False` are put into a queue, in the order in which the program makes them, and one thread per
topology runs them in that order; the caller gets a `Handle`. A blocking collective made meanwhile waits until the queue is
empty, so that all ranks keep one order of calls. An array belongs to its collective until `wait` has returned.

On device arrays the thread works on a stream of its own, which starts after what the caller's stream had been given before,
and which the caller's stream waits for in `wait`; the host does not wait for the device.

The thread calls MPI while the program may too, so MPI must have been started with MPI_THREAD_MULTIPLE, which is what mpi4py
asks for. Kernels and waits release the interpreter; whether anything is gained depends on a core that is free.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from hpczero.arrays import follow, from_any, is_device, queued, stream_beside
from hpczero.errors import ConfigError, HpczeroError
from hpczero.topology import Topology

_NAME = "communication thread"


class Handle:
    """A collective on its way. Made by collectives with `blocking=False`."""

    def __init__(self, run: Callable[[], Any], array: Any = None):
        self._run, self._done = run, threading.Event()
        self._array = array
        """In device memory, whose streams have to wait for each other."""
        self._before = None if array is None else queued(array)
        self._after: Any = None
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self) -> Any:
        """What the collective returns, once it is done; raises what it raised. The waits inside it have their limits."""
        self._done.wait()
        if self._after is not None:
            follow(self._array, self._after)
        if self._error is not None:
            raise self._error
        return self._result

    def test(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._done.is_set()

    def _finish(self, streams: dict[int, Any]) -> None:
        try:
            self._result = self._run() if self._array is None else self._beside(streams)
        except BaseException as error:      # noqa: BLE001 - belongs to whoever waits
            self._error = error
        self._run = None      # lets go of the arrays
        self._done.set()

    def _beside(self, streams: dict[int, Any]) -> Any:
        """Runs on the thread's stream for the array's device."""
        device = self._array.device
        stream = streams.get(device.id) or streams.setdefault(device.id, stream_beside(self._array))
        with device, stream:
            follow(self._array, self._before)
            try:
                return self._run()
            finally:
                self._after = queued(self._array)


class CommThread:
    """The queue of a topology and the thread that works on it; made at the first call, ended when the topology closes."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._last: Handle | None = None
        self._streams: dict[int, Any] = {}      # by device; kept, as CuPy keeps memory by stream
        # A program that ends without closing its topology must not wait for this thread.
        self._thread = threading.Thread(target=self._work, name=f"hpczero {_NAME}", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[[], Any], array: Any = None) -> Handle:
        handle = self._last = Handle(run, array)
        self._queue.put(handle)
        return handle

    def drain(self) -> None:
        """Returns when everything in the queue is done; at once on the thread itself."""
        last = self._last
        if last is not None and threading.current_thread() is not self._thread:
            last._done.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (handle := self._queue.get()) is not None:
            handle._finish(self._streams)
            del handle


def submit(topology: Topology, array: Any, run: Callable[[], Any]) -> Handle:
    """Queues a collective over `topology`. Called by every rank, in the same order as all its collectives.

    ConfigError where MPI's thread level does not allow it, which is the same on all ranks of a job.
    """
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        names = {MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized"}
        raise ConfigError(f"blocking=False needs MPI_THREAD_MULTIPLE, and MPI was started as {names[level]}: start it with "
                          "mpi4py.rc.thread_level = 'multiple' (the default), or call with blocking=True")
    if topology.closed:
        raise HpczeroError("this topology was closed: no collective can be started on it any more")
    return topology.keep(_NAME, CommThread, ends_first=True).submit(run, from_any(array) if is_device(array) else None)
