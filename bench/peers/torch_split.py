"""Times training steps of PyTorch's ways to split a model over Gloo on this host; prints one JSON line of step times.

`tensor`: DTensor with column- and row-wise layers, embedding and loss over a split vocabulary. `pipeline`: two stages of
torch.distributed.pipelining, 1F1B. `fsdp`: FSDP2's fully_shard for every block. The GPT is that of bench/jobs/gpt.toml with
separate linear layers for queries, keys and values, and a head of its own, as PyTorch's tutorials have it.
"""

import argparse
import json
import os
import tempfile
import time

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 4, 256, 4, 128, 1024


def make_modules():
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x):
            batch, context, _ = x.shape
            q, k, v = (part(x).view(batch, context, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o(mixed.transpose(1, 2).reshape(batch, context, -1))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention = Attention()
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            x = x + self.attention(self.ln_1(x))
            return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))

    class Part(nn.Module):
        """Some layers; the first part embeds, the last one has the head."""

        def __init__(self, layers, first, last):
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, WIDTH) if first else None
            self.positions = nn.Embedding(CONTEXT, WIDTH) if first else None
            self.blocks = nn.ModuleList(Block() for _ in range(layers))
            self.ln_f = nn.LayerNorm(WIDTH) if last else None
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if last else None

        def forward(self, x):
            if self.tokens is not None:
                x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks:
                x = block(x)
            return x if self.head is None else self.head(self.ln_f(x))

    return Part


def loss_of(logits, y):
    from torch.nn import functional as F

    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def adamw(parameters, fused):
    import torch

    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, fused=fused)


def tensor(options, rank, x, y):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    model = make_modules()(LAYERS, True, True)
    mesh = init_device_mesh("cpu", (options.workers,))
    plan = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for layer in range(LAYERS):
        block = f"blocks.{layer}."
        plan |= {block + name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "up")}
        plan |= {block + name: RowwiseParallel() for name in ("attention.o", "down")}
    parallelize_module(model, mesh, plan)
    optimizer = adamw(model.parameters(), False)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with loss_parallel():
            loss_of(model(x), y).backward()
        optimizer.step()

    return step


def pipeline(options, rank, x, y):
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    part = make_modules()(LAYERS // options.workers, rank == 0, rank == options.workers - 1)
    stage = PipelineStage(part, rank, options.workers, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.micro_batches, loss_fn=loss_of)
    optimizer = adamw(part.parameters(), True)

    def step():
        optimizer.zero_grad(set_to_none=True)
        schedule.step(*([x] if rank == 0 else []), **({"target": y} if rank == options.workers - 1 else {}))
        optimizer.step()

    return step


def fsdp(options, rank, x, y):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_modules()(LAYERS, True, True)
    mesh = init_device_mesh("cpu", (options.workers,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model.parameters(), False)
    share = options.batch // options.workers
    x, y = x[:share], y[:share]

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(x), y).backward()
        optimizer.step()

    return step


def worker(rank, options, rendezvous):
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(options.threads)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(options.workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=options.workers)
    torch.manual_seed(0)
    x, y = (torch.randint(VOCABULARY, (options.batch, CONTEXT)) for _ in range(2))
    step = {"tensor": tensor, "pipeline": pipeline, "fsdp": fsdp}[options.way](options, rank, x, y)
    times_ms = []
    for number in range(options.warmup + options.steps):
        begin = time.perf_counter()
        step()
        if number >= options.warmup:
            times_ms.append(1e3 * (time.perf_counter() - begin))
    dist.barrier()
    if rank == 0:
        print(json.dumps({"step_ms": times_ms, "torch": torch.__version__}), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=["tensor", "pipeline", "fsdp"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=5)
    options = parser.parse_args()
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(worker, (options, f"{folder}/rendezvous"), nprocs=options.workers)


if __name__ == "__main__":
    main()
