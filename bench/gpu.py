"""Times kolo's training steps on an NVIDIA GPU beside PyTorch's on the same GPU, in one run, and prints a Markdown table.

PyTorch runs under the interpreter that runs this script: eager and compiled, with fused AdamW, TF32 or bf16 autocast as the row says, and
channels-last for the images. Both sides train on one batch that is kept. Peak memory is the device's: what PyTorch's allocator had handed out
and what it had taken from the device for that; kolo takes what it plans.

    cargo build --release && python bench/gpu.py --rows gpt-bf16,lstm
    python bench/gpu.py --rows offload            # kolo alone: what recompute and offload save and cost
    python bench/gpu.py --rows replicas           # kolo alone: workers that share one GPU, for a model that does not fill it
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).resolve().parent
GPT = """kind = "gpt"
layers = 12
width = 768
heads = 12
context = 1024
vocab = 50304
tied = false"""
RESNET18 = 'kind = "resnet18"\nclasses = 10\nimage = [3, 32, 32]'
RESNET50 = 'kind = "resnet50"\nclasses = 1000\nimage = [3, 224, 224]'
LSTM = 'kind = "lstm"\nlayers = 2\nwidth = 512\ncontext = 128\nfeatures = 512\noutputs = 1'
SMALL_GPT = GPT.replace("12\nwidth = 768", "4\nwidth = 256").replace("heads = 12", "heads = 4").replace("1024\nvocab = 50304", "128\nvocab = 1024")
# name: model, source, batch, precision
ROWS = {
    "gpt-bf16": (GPT, "synthetic:tokens", 16, "bf16"),
    "gpt-tf32": (GPT, "synthetic:tokens", 16, "tf32"),
    "gpt-small-f32": (SMALL_GPT, "synthetic:tokens", 32, "f32"),
    "resnet18-tf32": (RESNET18, "synthetic:images", 256, "tf32"),
    "resnet50-bf16": (RESNET50, "synthetic:images", 256, "bf16"),
    "lstm-tf32": (LSTM, "synthetic:series", 64, "tf32"),
}


# Tables of kolo alone. name: the row whose job it is, then what each line adds to the command.
OFFLOAD, RECOMPUTE = ["--set", "memory.offload=optimizer"], ["--set", "memory.recompute=blocks"]
WEIGHTS = ["--set", "memory.offload=weights"]
MEDIUM = ["--set", "model.layers=24", "--set", "model.width=1024", "--set", "model.heads=16"]
TABLES = {
    "offload": ("gpt-bf16", {"": [], "recompute": RECOMPUTE, "offload": OFFLOAD, "both": RECOMPUTE + OFFLOAD, "weights": WEIGHTS,
                             "weights, recompute": WEIGHTS + RECOMPUTE, "355M": MEDIUM, "355M, both": MEDIUM + RECOMPUTE + OFFLOAD,
                             "355M, weights, recompute": MEDIUM + WEIGHTS + RECOMPUTE}),
    "replicas": (
        "gpt-small-f32",
        {f"{count} workers": ["-n", str(count), "--set", f"data.batch={8 * count}", "--set", f"data.grains={count}"]
         for count in (1, 2, 4, 8)},
    ),
}  # fmt: skip


def job_of(name):
    model, source, batch, precision = ROWS[name]
    return f"""[job]
name = "{name}"
[model]
{model}
[data]
source = "{source}"
batch = {batch}
grains = 1
[train]
steps = 1000
precision = "{precision}"
optimizer = {{ kind = "adamw", lr = 1e-3, weight_decay = 0.01 }}
"""


def kolo(options, name, more=()):
    with tempfile.TemporaryDirectory() as folder:
        job, report = Path(folder) / "job.toml", Path(folder) / "report.json"
        job.write_text(job_of(name))
        command = [options.kolo, "bench", "train", str(job), "--device", "cuda", "--hold-batch", "--steps",
                   str(options.steps), "--warmup", str(options.warmup), "--report", str(report), *more]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[:3]}
        return json.loads(report.read_text())


def peer(options, name, mode):
    command = [sys.executable, __file__, "--peer", name, "--mode", mode, "--steps", str(options.steps),
               "--warmup", str(options.warmup)]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.limit)
    except subprocess.TimeoutExpired:
        return {"error": ["no answer in time"]}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def torch_model(name):
    import torch

    sys.path.insert(0, str(BENCH / "peers"))
    import models

    _, _, batch, _ = ROWS[name]
    if name.startswith("gpt"):
        layers, width, heads, context, vocab = (4, 256, 4, 128, 1024) if "small" in name else (12, 768, 12, 1024, 50304)
        tokens = lambda: torch.randint(vocab, (batch, context), device="cuda")  # noqa: E731
        return models.Gpt(layers, width, heads, context, vocab, tied=False), tokens(), tokens(), models.loss_of
    if name.startswith("lstm"):
        return models.Lstm(512, 512, 2), torch.randn(batch, 128, 512, device="cuda"), torch.randn(batch, 1, device="cuda"), models.loss_of
    if name.startswith("resnet18"):
        model, size, classes = models.ResNet18(), 32, 10
    else:
        import torchvision

        model, size, classes = torchvision.models.resnet50(), 224, 1000
    x = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(classes, (batch,), device="cuda")
    loss = lambda model, x, y: torch.nn.functional.cross_entropy(model(x), y)  # noqa: E731
    return model.to(memory_format=torch.channels_last), x, y, loss


def run_peer(options):
    import torch

    name, precision = options.peer, ROWS[options.peer][3]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest" if precision == "f32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "f32"
    model, x, y, loss_of = torch_model(name)
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    compiled = torch.compile(loss_of) if options.mode == "compile" else loss_of

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = compiled(model, x, y)
        loss.backward()
        optimizer.step()

    for _ in range(options.warmup):
        step()
    times = []
    for _ in range(options.steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    print(json.dumps({"median": statistics.median(times), "peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated")
    parser.add_argument("--modes", default="eager,compile")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--limit", type=int, default=150, help="seconds for one contestant")
    parser.add_argument("--kolo", default=str(BENCH.parent / "target/release/kolo"))
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--mode", default="eager", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = set(options.rows.split(",")) - set(ROWS) - set(TABLES)
    if unknown:
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}; there are {', '.join([*ROWS, *TABLES])}")
    return options


def table(options, name):
    """One kind of job under several settings, kolo alone: time, memory of the device, samples per second against the first line."""
    row, lines = TABLES[name]
    print(f"| {name}: {row} | ms | GiB of the device | samples/s | against the first |\n|---|---|---|---|---|")
    first = None
    for line, more in lines.items():
        own = kolo(options, row, more)
        if "error" in own:
            print(f"| {line} | {own['error']} | | | |", flush=True)
            continue
        first = first or own["samples_per_s"]
        print(f"| {line} | {own['step_ms']['median']:.2f} | {own['device_bytes'] / 2**30:.2f} | {own['samples_per_s']:.0f} "
              f"| {own['samples_per_s'] / first:.2f} |", flush=True)  # fmt: skip


def main():
    options = arguments()
    if options.peer:
        return run_peer(options)
    tables = [name for name in options.rows.split(",") if name in TABLES]
    for name in tables:
        table(options, name)
    options.rows = ",".join(name for name in options.rows.split(",") if name in ROWS)
    if not options.rows:
        return None
    modes = [mode for mode in options.modes.split(",") if mode]
    print("| row | kolo ms (GiB) | " + " | ".join(f"torch {mode} ms (GiB used, taken)" for mode in modes) + " | kolo / best torch |")
    print("|" + "---|" * (3 + len(modes)))
    for name in options.rows.split(","):
        own = kolo(options, name)
        others = [peer(options, name, mode) for mode in modes]
        own_ms = own.get("step_ms", {}).get("median")
        cells = [f"{own_ms:.2f} ({own['device_bytes'] / 2**30:.2f})" if own_ms else str(own.get("error"))]
        cells += [f"{one['median']:.2f} ({one['peak'] / 2**30:.2f}, {one['reserved'] / 2**30:.2f})" if "median" in one else str(one["error"]) for one in others]
        best = min((one["median"] for one in others if "median" in one), default=None)
        cells.append(f"{own_ms / best:.2f}" if own_ms and best else "")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
