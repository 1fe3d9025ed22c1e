"""One sequence over many GPUs: the scans and their gradients where each rank holds a contiguous shard of the time axis.

    import cupy, cuscan.distributed as d

    ranks = d.Nccl()                       # a process for each GPU, as torchrun or mpirun makes them
    y = d.selective_scan(ranks, u, delta, A, B, C)        # this rank's steps in, this rank's steps out
    grads = d.selective_scan_vjp(ranks, u, delta, A, B, C, grad_out=grad_y)

Shards may be uneven or empty. They are in the order of the ranks, with `reverse` too. All functions take a
`Communicator` first and then what they take without ranks. What is special is said in `linear_scan`: h0 is read where a
sequence begins, last states are given where it ends, cu_seqlens counts from the first step of all ranks. Gradients of
what is the same for all steps (A, D, delta_bias, constant B and C, a gate broadcast along time) are totals over the
ranks, on every rank. Arrays are CuPy's, NumPy's or those of DLPack producers; PyTorch's and JAX's, whose own
gradients would be lost, are refused.

**What is done.** All steps of a shard are one map, the product of their gates and the state that they reach from
nothing. It is the fold of the summaries that a scan whose time is cut into chunks makes anyway, so nothing is computed
twice. One all-gather brings these maps to all; each rank folds those before its own, first rank first, and begins from
there. A shard in which something is forgotten (a reset, the start of a sequence) says so in a flag, which hides the
ranks before it. Gradients go the other way in the same manner; those of `linear_scan` send the last state of each shard
along, which the next needs for the gradient of its first gate. The order is fixed, and so are the bits: they depend on
how many ranks there are and where they are cut. Sums over time take one more all-gather, and are added rank by rank.
Before all that the ranks compare, through the memory of the hosts, types, shapes, flags and cu_seqlens (by a digest of
16 bytes; on a GPU the offsets' values are not looked at) and learn the lengths of all shards. Nobody launches a message
whose size others do not expect; one that differs makes a ValueError on every rank.

**How much is sent.** A rank sends 2 s bytes for each row, s being 4 in float32 and 8 in float64 and complex64, and a
row being a (batch, channel, state), or one of linear_scan's recurrences, whose gradients send 3 s; with mask, reset or
cu_seqlens one byte more a (batch), or a row of linear_scan. It receives that from everybody. 5120 channels of 16 states
in float32 are 640 KiB a rank: 5 MiB with 8 ranks, 640 MiB with 1,000.

A ring passes a message on size - 1 times: 7 hops of some 2 us over NVLink with 8 ranks, 999 with 1,000 (125 of them
between hosts, some 6 us each: 2.5 ms together). On an H200 the scan of a step and channel of 16 states takes 15 ps, and
the messages are 128 bytes a channel and rank. They take less than a tenth of its time where a shard has 200 steps for
each rank at 450 GB/s in a host, 1,800 for each rank at 50 GB/s between hosts: 1,600 steps a shard with 8 GPUs, and 1.8
million with 1,000. With shorter shards make groups of the ranks, `Levels`: a rank of 8 in 125 hosts receives 8 + 125
messages in place of 1,000, in 7 + 124 hops (0.8 ms), and 240,000 steps a shard are enough; in three levels of 10 they
are 30 messages in 27 hops (0.1 ms), and 54,000 steps.

**Who talks.** `Nccl` for processes with a GPU each, `Threads` for ranks in one process (NumPy arrays, or streams of a
GPU), `Torch` and `Mpi` for those who have a process group or mpi4py's communicator, and whatever has `rank`, `size` and
`all_gather`. Where a rank does not come in time, or fails, the others get a `CommunicatorError`: none hangs.

`python -m cuscan.distributed` shows it on the GPUs that are there.
"""

from ._api import linear_scan, linear_scan_vjp, selective_scan, selective_scan_vjp
from ._communicators import Communicator, CommunicatorError, Levels, Mpi, Nccl, Threads, Torch

__all__ = [
    "Communicator", "CommunicatorError", "Levels", "Mpi", "Nccl", "Threads", "Torch", "linear_scan",
    "linear_scan_vjp", "selective_scan", "selective_scan_vjp",
]  # fmt: skip
