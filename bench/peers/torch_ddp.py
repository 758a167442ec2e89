"""Times training steps of PyTorch's DistributedDataParallel over Gloo on this host; prints one JSON line of step times.

The global batch is that of the job; every worker takes its share. The time of a step is that of the first worker.
"""

import argparse
import json
import os
import tempfile
import time


def worker(rank, options, rendezvous):
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import models

    torch.set_num_threads(options.threads)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.workers)
    torch.manual_seed(0)
    model = models.Gpt(4, 256, 4, 128, 1024)
    share = options.batch // options.workers
    x, y = torch.randint(1024, (share, 128)), torch.randint(1024, (share, 128))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    times_ms = []
    for step in range(options.warmup + options.steps):
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        models.loss_of(model, x, y).backward()
        optimizer.step()
        if step >= options.warmup:
            times_ms.append(1e3 * (time.perf_counter() - begin))
    dist.barrier()
    if rank == 0:
        print(json.dumps({"step_ms": times_ms, "torch": torch.__version__}), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=5)
    options = parser.parse_args()
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(worker, (options, f"{folder}/rendezvous"), nprocs=options.workers)


if __name__ == "__main__":
    main()
