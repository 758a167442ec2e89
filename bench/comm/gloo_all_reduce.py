"""All-reduce of f32 by PyTorch over Gloo, as `kolo bench comm` measures its own: one JSON row per size.

Each sample starts at a barrier; its time is that of the slowest rank; the row is the median over the samples.

    python gloo_all_reduce.py --ranks 2 --bytes 4,1048576
"""

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

BYTES_PER_SIZE = 256 << 20
SAMPLES_MIN, SAMPLES_MAX = 7, 100


def measure(size, ranks, fresh):
    data = torch.zeros(size // 4)
    samples = max(SAMPLES_MIN, min(SAMPLES_MAX, BYTES_PER_SIZE // size))
    times = []
    for sample in range(-samples // 10 - 1, samples):
        if fresh:
            data.zero_()
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(data)
        slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        if sample >= 0:
            times.append(slowest.item() * 1e6)
    us = statistics.median(times)
    bus = size / us / 1e3 * 2 * (ranks - 1) / ranks
    return {"op": "all_reduce", "bytes": size, "ranks": ranks, "transport": "gloo", "us_median": us, "busbw_gbps": bus}


def rank_main(rank, ranks, sizes, fresh, store):
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for size in sizes:
        row = measure(size, ranks, fresh)
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", default="4,1048576")
    parser.add_argument("--fresh", action="store_true", help="write the vector anew before every call, outside the time")
    options = parser.parse_args()
    sizes = [int(size) for size in options.bytes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (options.ranks, sizes, options.fresh, f"{folder}/store"), options.ranks)


if __name__ == "__main__":
    main()
