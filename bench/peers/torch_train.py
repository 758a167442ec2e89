"""Times whole PyTorch training steps on the CPU: forward, backward, AdamW.

Runs a fixed number of steps and writes a JSON report, or with `--serve` answers each line `run K` on standard input
with one JSON line of K step times, so that a driver can take turns between contestants.
"""

import argparse
import json
import os
import platform
import sys
import time

STARTED = time.perf_counter()


def age_ms():
    """Milliseconds since the process started, counting the interpreter and the imports."""
    try:
        with open("/proc/self/stat") as stat:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
        return 1e3 * (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except OSError:
        return 1e3 * (time.perf_counter() - STARTED)


def peak_rss_bytes():
    # Not getrusage on Linux: its peak survives exec and so includes the memory of whoever started this process.
    try:
        with open("/proc/self/status") as status:
            return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if platform.system() == "Darwin" else 1024 * peak


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, choices=["gpt", "resnet18", "lstm", "mlp"])
    parser.add_argument("--mode", default="eager", choices=["eager", "compile"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--precision", default="f32", choices=["f32", "bf16"], help="bf16: autocast")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int, help="gpt (4) and lstm (2)")
    parser.add_argument("--context", type=int, help="gpt (128) and lstm (64)")
    parser.add_argument("--features", type=int, default=256, help="input size of the lstm")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--report", help="file for the JSON report; standard output otherwise")
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.steps < 1 or options.threads < 1:
        parser.error("--steps and --threads must be at least 1")
    if options.channels_last and options.model != "resnet18":
        parser.error("--channels-last only means something for resnet18")
    return options


def build(options):
    """The model and its fixed synthetic batch, in the shapes of bench/jobs."""
    import torch

    import models

    torch.manual_seed(0)
    if options.model == "mlp":
        batch = options.batch or 128
        return models.Mlp([784, 512, 512, 10]), torch.randn(batch, 784), torch.randint(10, (batch,))
    if options.model == "resnet18":
        batch = options.batch or 32
        return models.ResNet18(), torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    if options.model == "lstm":
        batch, context = options.batch or 32, options.context or 64
        model = models.Lstm(options.features, 256, options.layers or 2)
        return model, torch.randn(batch, context, options.features), torch.randn(batch, 1)
    batch, context = options.batch or 8, options.context or 128
    model = models.Gpt(options.layers or 4, 256, 4, context, 1024)
    return model, torch.randint(1024, (batch, context)), torch.randint(1024, (batch, context))


def make_step(options):
    import torch

    import models

    torch.set_num_threads(options.threads)
    model, x, y = build(options)
    if options.channels_last:
        model = model.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    # fused is the fastest of PyTorch's three AdamW loops on the CPU too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    loss_of = torch.compile(models.loss_of) if options.mode == "compile" else models.loss_of

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bf16"):
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()

    return step


def timed(step, count):
    samples_ms = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        samples_ms.append(1e3 * (time.perf_counter() - begin))
    return samples_ms


def serve(step, import_rss_bytes):
    for line in sys.stdin:
        words = line.split()
        if len(words) != 2 or words[0] != "run" or not words[1].isdigit():
            sys.exit(f"expected `run K`, got {line.strip()!r}")
        samples_ms = timed(step, int(words[1]))
        answer = {"step_ms": samples_ms, "peak_rss_bytes": peak_rss_bytes(), "import_rss_bytes": import_rss_bytes}
        print(json.dumps(answer), flush=True)


def report(options, step, import_rss_bytes):
    import torch

    step()
    startup_ms = age_ms()
    timed(step, max(0, options.warmup - 1))
    samples_ms = timed(step, options.steps)
    ordered = sorted(samples_ms)
    answer = {
        "model": options.model,
        "mode": options.mode,
        "threads": options.threads,
        "memory_format": "channels_last" if options.channels_last else "contiguous",
        "step_ms": {
            "median": (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2,
            "p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
            "min": ordered[0],
        },
        "samples_ms": samples_ms,
        "peak_rss_bytes": peak_rss_bytes(),
        "import_rss_bytes": import_rss_bytes,
        "startup_ms": startup_ms,
        "torch": torch.__version__,
    }
    text = json.dumps(answer, indent=1) + "\n"
    if options.report:
        with open(options.report, "w") as file:
            file.write(text)
    else:
        print(text, end="")


def main():
    options = arguments()
    # Thread counts are read when the libraries load, so they are set before torch is imported.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    # One compile thread keeps Inductor from leaving a pool of idle worker processes beside the measured one.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch  # noqa: F401

    # Loading PyTorch costs memory whatever the model; a build with CUDA costs more of it. Reported apart.
    import_rss_bytes = peak_rss_bytes()
    step = make_step(options)
    if options.serve:
        serve(step, import_rss_bytes)
    else:
        report(options, step, import_rss_bytes)


if __name__ == "__main__":
    main()
