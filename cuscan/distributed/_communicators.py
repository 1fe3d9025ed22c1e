"""How ranks talk: the protocol, threads of one process, NCCL, and those of torch.distributed and mpi4py."""

from __future__ import annotations

import ast
import contextlib
import contextvars
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import numpy as np

from cuscan._arrays import Array, _cupy

Result = TypeVar("Result")

_POLL = 0.002  # seconds between two looks at a collective


class CommunicatorError(RuntimeError):
    """Ranks could not talk: one was not there in time, failed or was aborted. The communicator is of no more use."""


class Communicator(Protocol):
    """What `cuscan.distributed` needs of the ranks that share a sequence.

    Attributes
    ----------
    rank, size : int
        Number of this rank in the order of its shard in time, and how many there are.
    """

    rank: int
    size: int

    def all_gather(self, send: Array, receive: Array, timeout: float) -> None:
        """Write each rank's bytes to row `rank` of everybody's `receive`.

        Parameters
        ----------
        send : array (bytes,), uint8
            C-contiguous, of the same size on all ranks.
        receive : array (size, bytes), uint8
            C-contiguous, of the same kind. NumPy's arrays are full when the call returns. Those of CuPy are on this
            rank's current device, read and written in the order of its current stream; the call does not wait for it.
        timeout : float
            Seconds after which a rank that has not come makes this call, or the next, a `CommunicatorError`.
        """


# --- threads ---------------------------------------------------------------------------------------------------------


class Threads:
    """A rank as a thread of this process; `Threads.run` makes them.

    With NumPy arrays it runs anywhere. With CuPy arrays every thread uses its own current stream, on one device or on
    several that can read each other's memory.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    @staticmethod
    def run(
        size: int,
        function: Callable[[Communicator], Result],
        *,
        turns: contextlib.AbstractContextManager[Any] | None = None,
    ) -> list[Result]:
        """Call function(communicator) in `size` threads and give their results by rank.

        Parameters
        ----------
        size : int
            How many ranks there are.
        function : callable
            What each does. If one raises, those that wait for it get a CommunicatorError, and its own is raised here.
        turns : lock, optional
            Held by the one rank that runs, and free while all wait for each other: for code that is not made for
            threads.
        """
        meeting = _Meeting(size, turns)
        results: list[Any] = [None] * size
        errors: list[BaseException] = []

        def rank(number: int) -> None:
            try:
                with turns or contextlib.nullcontext():
                    results[number] = function(Threads(number, meeting))
            except BaseException as error:  # noqa: BLE001 raised in the caller's thread
                errors.append(error)
                meeting.abort()

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(rank, number)) for number in range(size)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for error in sorted(errors, key=lambda error: isinstance(error, CommunicatorError)):
            raise error
        return results

    def all_gather(self, send: Array, receive: Array, timeout: float) -> None:
        """As the protocol says."""
        if isinstance(send, np.ndarray):
            with self._meeting.of(self.rank, send, timeout) as sent:
                for row, each in zip(receive, sent, strict=True):
                    row[...] = each
            return
        cuda = _cupy("the message is on a GPU").cuda
        stream = cuda.get_current_stream()

        def mark() -> Any:
            event = cuda.Event(disable_timing=True)
            event.record(stream)
            return event

        with self._meeting.of(self.rank, (send, mark()), timeout) as sent:
            for rank, (each, ready) in enumerate(sent):
                stream.wait_event(ready)
                receive[rank].data.copy_from_device_async(each.data, each.nbytes, stream)
        # What is sent may be overwritten when all have read it.
        with self._meeting.of(self.rank, mark(), timeout) as read:
            for event in read:
                stream.wait_event(event)


class _Meeting:
    """Where the threads of all ranks bring something each, and see what the others brought."""

    def __init__(self, size: int, turns: contextlib.AbstractContextManager[Any] | None) -> None:
        self.size, self._turns = size, turns
        self._barrier = threading.Barrier(size)
        self._brought: list[Any] = [None] * size

    @contextlib.contextmanager
    def of(self, rank: int, brought: Any, timeout: float) -> Iterator[list[Any]]:
        self._brought[rank] = brought
        self._wait(timeout)
        yield self._brought
        self._wait(timeout)

    def abort(self) -> None:
        """Nobody waits any more."""
        self._barrier.abort()

    def _wait(self, timeout: float) -> None:
        turns: Any = self._turns
        if turns is not None:
            turns.release()
        try:
            self._barrier.wait(timeout)
        except threading.BrokenBarrierError:
            raise CommunicatorError(f"not all of {self.size} ranks came within {timeout:g} s, or one failed") from None
        finally:
            if turns is not None:
                turns.acquire()


# --- groups ----------------------------------------------------------------------------------------------------------


class Levels:
    """Ranks in groups, such as the GPUs of each host: first the ranks of a group exchange, then the groups.

    Parameters
    ----------
    inner : Communicator
        Of the ranks of this rank's group, neighbours in time.
    outer : Communicator
        Of the ranks that have the same number in each of the groups, which are of one size; or again of levels.

    Attributes
    ----------
    levels : tuple of Communicator
        From the innermost out.

    Notes
    -----
    Each rank folds the maps of its group, and then those of the groups before, and so receives inner.size + outer.size
    messages in place of their product. The bits are others than those of one level.
    """

    def __init__(self, inner: Communicator, outer: Communicator) -> None:
        self.rank, self.size = outer.rank * inner.size + inner.rank, outer.size * inner.size
        self.levels = (*getattr(inner, "levels", (inner,)), *getattr(outer, "levels", (outer,)))
        self._inner, self._outer = inner, outer

    def all_gather(self, send: Array, receive: Array, timeout: float) -> None:
        """As the protocol says."""
        group = receive[: self._inner.size].copy()
        self._inner.all_gather(send, group, timeout)
        self._outer.all_gather(group.reshape(-1), receive.reshape(self._outer.size, -1), timeout)


# --- NCCL ------------------------------------------------------------------------------------------------------------


class Nccl:
    """A rank as a process with a GPU of its own: NCCL between the GPUs, TCP for the small messages of the hosts.

    Parameters
    ----------
    rank, size : int, optional
        Default: the environment's RANK and WORLD_SIZE, as torchrun sets them, or those of Open MPI's or Slurm's
        launchers; 0 and 1 without any.
    address : str, optional
        Host and port of rank 0, "host:port". Default: MASTER_ADDR and MASTER_PORT, or the port above that where
        torchrun has a store of its own there, else "127.0.0.1:29411".
    device : int, optional
        CuPy's device. Default: LOCAL_RANK. It is made current.
    timeout : float
        Seconds in which all ranks must have come.

    Notes
    -----
    A thread looks at every collective's event and at the communicator's asynchronous error. Where a collective is not
    over in time, the communicator is aborted: the stream goes on, and the next call raises `CommunicatorError`.
    """

    def __init__(
        self,
        rank: int | None = None,
        size: int | None = None,
        *,
        address: str | None = None,
        device: int | None = None,
        timeout: float = 60.0,
    ) -> None:
        cupy = _cupy("NCCL is for GPUs")
        from cupy.cuda import nccl

        if not nccl.available:
            raise ImportError("CuPy does not find NCCL: install cuscan with the extra nccl12 or nccl13")
        names = {"rank": _RANKS, "size": _SIZES, "local": _LOCAL_RANKS}
        found = {name: next((os.environ[x] for x in each if x in os.environ), None) for name, each in names.items()}
        self.rank = int(found["rank"] or 0) if rank is None else rank
        self.size = int(found["size"] or 1) if size is None else size
        self.device = int(found["local"] or 0) if device is None else device
        address = address or _address()
        cupy.cuda.Device(self.device).use()
        self._cuda = cupy.cuda
        self._hosts = Hosts(self.rank, self.size, address, timeout)
        own = repr(nccl.get_unique_id()).encode() if self.rank == 0 else b""  # bytes or a tuple, by CuPy's version
        identity = ast.literal_eval(self._hosts.all_gather(own, timeout)[0].decode())
        self._nccl, self._type = nccl.NcclCommunicator(self.size, identity, self.rank), nccl.NCCL_UINT8
        self._watched = _Watch(self._nccl, self._cuda, self.device)

    def all_gather(self, send: Array, receive: Array, timeout: float) -> None:
        """As the protocol says."""
        if isinstance(send, np.ndarray):
            self._watched.check()
            for row, each in zip(receive, self._hosts.all_gather(send.tobytes(), timeout), strict=True):
                row[...] = np.frombuffer(each, np.uint8)
            return
        self._watched.check()
        stream = self._cuda.get_current_stream()
        self._nccl.allGather(send.data.ptr, receive.data.ptr, send.nbytes, self._type, stream.ptr)
        event = self._cuda.Event(disable_timing=True)
        event.record(stream)
        self._watched.add(event, timeout)

    def close(self) -> None:
        """Free the communicator."""
        self._watched.close()
        self._hosts.close()


# Of torchrun, Open MPI, MPICH and Slurm.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def _address() -> str:
    port = int(os.environ.get("MASTER_PORT", "29411"))
    taken = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{port + taken}"


class _Watch:
    """A thread that sees every collective end, or aborts the communicator."""

    def __init__(self, communicator: Any, cuda: Any, device: int) -> None:
        self._communicator, self._cuda, self._device = communicator, cuda, device
        self._changed = threading.Condition()
        self._under_way: list[tuple[Any, float, float]] = []
        self._closed = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="cuscan NCCL watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what was seen."""
        if self.failure is not None:
            raise CommunicatorError(self.failure)

    def add(self, event: Any, timeout: float) -> None:
        """Watch one more collective, whose end is an event."""
        with self._changed:
            self._under_way.append((event, time.monotonic() + timeout, timeout))
            self._changed.notify()

    def close(self) -> None:
        """End the thread, and free the communicator."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        if self.failure is None:
            self._communicator.destroy()

    def _run(self) -> None:
        with self._cuda.Device(self._device):
            while True:
                with self._changed:
                    while not self._under_way and not self._closed:
                        self._changed.wait()
                    if not self._under_way:
                        return
                    event, deadline, timeout = self._under_way[0]
                if self.failure is None:
                    self.failure = self._seen(event, deadline, timeout)
                    if self.failure is not None:
                        self._communicator.abort()
                if self.failure is not None or event.done:
                    with self._changed:
                        self._under_way.pop(0)
                    continue
                time.sleep(_POLL)

    def _seen(self, event: Any, deadline: float, timeout: float) -> str | None:
        try:
            self._communicator.check_async_error()
        except Exception as error:  # noqa: BLE001 whatever NCCL says
            return f"NCCL failed in an earlier call: {error}"
        if not event.done and time.monotonic() > deadline:
            return f"not all ranks came within {timeout:g} s in an earlier call, which was aborted"
        return None


class Hosts:
    """Bytes between the hosts of all ranks by TCP: rank 0 collects them and sends all to everyone.

    Parameters
    ----------
    rank, size : int
        This rank, and how many there are.
    address : str
        Where rank 0 listens, "host:port".
    timeout : float
        Seconds in which all must have come.
    """

    def __init__(self, rank: int, size: int, address: str, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._sockets: list[socket.socket] = []  # rank 0: of the others, by rank; the others: of rank 0
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + timeout
        if size == 1:
            return
        if rank > 0:
            self._sockets.append(self._connect(host, int(port), deadline))
            self._sockets[0].sendall(struct.pack("<q", rank))
            return
        came: dict[int, socket.socket] = {}
        local = host in ("127.0.0.1", "localhost")
        with socket.create_server((host if local else "", int(port)), backlog=size) as server:
            while len(came) < size - 1:
                server.settimeout(max(deadline - time.monotonic(), 1e-3))
                try:
                    each, _ = server.accept()
                except TimeoutError:
                    missing = sorted({*range(1, size)} - {*came})
                    raise CommunicatorError(f"ranks {missing} did not come within {timeout:g} s") from None
                each.settimeout(timeout)
                came[struct.unpack("<q", _receive(each, 8))[0]] = each
        self._sockets = [came[number] for number in range(1, size)]
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connect(self, host: str, port: int, deadline: float) -> socket.socket:
        while True:
            try:
                found = socket.create_connection((host, port), max(deadline - time.monotonic(), 1e-3))
            except OSError as error:
                if time.monotonic() > deadline:
                    raise CommunicatorError(f"rank 0 is not there at {host}:{port}: {error}") from None
                time.sleep(0.05)
            else:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return found

    def all_gather(self, message: bytes, timeout: float) -> list[bytes]:
        """The messages of all ranks, by rank."""
        if self.size == 1:
            return [message]
        deadline, messages = time.monotonic() + timeout, [message]
        try:
            if self.rank > 0:
                self._sockets[0].settimeout(timeout)
                _send(self._sockets[0], message)
                return [_take(self._sockets[0]) for _ in range(self.size)]
            for each in self._sockets:
                each.settimeout(max(deadline - time.monotonic(), 1e-3))
                messages.append(_take(each))
            together = b"".join(struct.pack("<q", len(each)) + each for each in messages)
            for each in self._sockets:
                each.sendall(together)
        except OSError as error:
            self.close()
            raise CommunicatorError(f"not all ranks came within {timeout:g} s: {error or 'one has gone'}") from None
        return messages

    def close(self) -> None:
        """Close the connections, so that the others do not wait."""
        for each in self._sockets:
            each.close()


def _send(to: socket.socket, message: bytes) -> None:
    to.sendall(struct.pack("<q", len(message)) + message)


def _take(one: socket.socket) -> bytes:
    return _receive(one, struct.unpack("<q", _receive(one, 8))[0])


def _receive(one: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = one.recv(count - len(parts))
        if not part:
            raise ConnectionError("a rank has gone")
        parts += part
    return parts


# --- those of others -------------------------------------------------------------------------------------------------


class Torch:
    """The ranks of a process group of torch.distributed: one that has gloo for the CPU, and NCCL for GPUs.

    Parameters
    ----------
    group : ProcessGroup, optional
        Default: the whole world. ``torch.distributed.init_process_group("cpu:gloo,cuda:nccl")`` makes what is needed.
    """

    def __init__(self, group: Any = None) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._group = torch, dist, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, send: Array, receive: Array, timeout: float) -> None:  # noqa: ARG002 the group has its own
        """As the protocol says; the group's own timeout holds."""
        torch, cupy_stream = self._torch, None
        if not isinstance(send, np.ndarray):
            cupy_stream = torch.cuda.ExternalStream(_cupy("the message is on a GPU").cuda.get_current_stream().ptr)
        with torch.cuda.stream(cupy_stream):
            to, message = (torch.from_dlpack(x) for x in (receive, send))
            self._dist.all_gather(list(to.unbind(0)), message, group=self._group)


class Mpi:
    """The ranks of a communicator of mpi4py; messages on a GPU go through the memory of the host.

    Parameters
    ----------
    communicator : mpi4py.MPI.Comm
        Such as MPI.COMM_WORLD.
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()

    def all_gather(self, send: Array, receive: Array, timeout: float) -> None:
        """As the protocol says."""
        if isinstance(send, np.ndarray):
            request, end = self._communicator.Iallgather(send, receive), time.monotonic() + timeout
            while not request.Test():
                if time.monotonic() > end:
                    request.Cancel()
                    raise CommunicatorError(f"not all ranks came within {timeout:g} s")
                time.sleep(_POLL / 100)
            return
        rows = np.empty(receive.shape, np.uint8)
        self.all_gather(send.get(), rows, timeout)
        receive.set(rows)
