"""Times kolo's training steps against PyTorch's, taking turns in one run, and prints a Markdown table.

The PyTorch contestants run under the interpreter that runs this script. A ratio compares kolo with the fastest PyTorch
contestant of that model, whichever mode and memory format that is; its spread is the smallest and largest ratio of the
medians of one round. Start-up is from the start of the process to the end of its first step; the compiled one profits
from Inductor's cache on disk from its second run on.

    cargo build --release && python bench/engine.py --models gpt,mlp
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from contestant import THREADS, Contestant, ContestantFailed, take_turns

BENCH = Path(__file__).resolve().parent
MODELS = ["gpt", "resnet18", "lstm", "mlp"]
# By default glibc hands large freed blocks back to the kernel, and a step pays for faulting them in again. Tuning
# guides for PyTorch on the CPU advise changing the allocator, so the peer runs as a user who read one would run it.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
COLUMNS = [
    "model", "kolo ms", "torch eager ms", "torch compiled ms", "kolo / best torch (spread)",
    "kolo peak MiB", "torch peak MiB (over import)", "peak ratio (over import)",
    "kolo start ms", "torch eager start ms", "torch compiled start ms",
]  # fmt: skip


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--modes", default="eager,compile", help="PyTorch's contestants, comma-separated")
    parser.add_argument("--precision", default="f32", choices=["f32", "bf16"], help="of all; PyTorch's bf16 is autocast")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="timed steps per contestant and round")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--kolo", default=str(BENCH.parent / "target/release/kolo"))
    parser.add_argument("--default-malloc", action="store_true", help="leave glibc's malloc untuned for PyTorch")
    parser.add_argument("--report", help="file for every sample, as JSON")
    options = parser.parse_args()
    unknown = set(options.models.split(",")) - set(MODELS)
    if unknown:
        parser.error(f"unknown models: {', '.join(sorted(unknown))}")
    return options


def commands(model, options):
    """Contestant name to command line."""
    job = BENCH / "jobs" / f"{model}.toml"
    found = {"kolo": [options.kolo, "bench", "train", str(job), "--serve", "--hold-batch", "--threads", str(THREADS)]}
    found["kolo"] += ["--set", f"train.precision={options.precision}"]
    peer = [sys.executable, str(BENCH / "peers/torch_train.py"), "--serve", "--model", model, "--threads", str(THREADS)]
    peer += ["--precision", options.precision]
    for mode in options.modes.split(","):
        found[f"{mode} contiguous"] = [*peer, "--mode", mode]
        if model == "resnet18":
            found[f"{mode} channels_last"] = [*peer, "--mode", mode, "--channels-last"]
    return found


def compete(model, options, log):
    contestants = []
    try:
        for name, command in commands(model, options).items():
            tuned = name != "kolo" and not options.default_malloc
            try:
                contestants.append(Contestant(name, command, log, KEEP_FREED_MEMORY if tuned else None))
            except ContestantFailed as error:
                print(f"left out of {model}: {error}", file=sys.stderr)
        take_turns(contestants, options.rounds, options.steps, options.warmup)
    finally:
        for contestant in contestants:
            contestant.close()
    # A waiting process that wakes now and then is harmless; one that spins is not. The clock ticks every 10 ms.
    total_ms = sum(sum(samples) for contestant in contestants for samples in contestant.rounds_ms)
    for contestant in contestants:
        if contestant.idle_cpu_ms > 20 + 0.02 * total_ms:
            print(f"{model}: {contestant.name} used {contestant.idle_cpu_ms:.0f} ms while waiting", file=sys.stderr)
    return contestants


def ratio_text(kolo, torch):
    rounds = [
        statistics.median(ours) / statistics.median(theirs) for ours, theirs in zip(kolo.rounds_ms, torch.rounds_ms)
    ]
    return f"{kolo.median_ms() / torch.median_ms():.2f} ({min(rounds):.2f}–{max(rounds):.2f})"


def row(model, contestants):
    kolo = next((one for one in contestants if one.name == "kolo"), None)
    torch = [one for one in contestants if one.name != "kolo"]
    best = {
        mode: min((one for one in torch if one.name.startswith(mode)), key=Contestant.median_ms, default=None)
        for mode in ("eager", "compile")
    }

    def step_cell(one):
        if one is None:
            return "—"
        format_note = f" ({one.name.split()[1]})" if model == "resnet18" else ""
        return f"{one.median_ms():.2f}{format_note}"

    def start_cell(one):
        return f"{one.startup_ms:.0f}" if one else "—"

    # Against the smallest PyTorch contestant, which need not be the fastest.
    leanest = min(torch, key=lambda one: one.peak_rss_bytes, default=None)
    over_import = leanest.peak_rss_bytes - leanest.import_rss_bytes if leanest else 0
    both = kolo and leanest
    if both:
        memory_ratio = f"{kolo.peak_rss_bytes / leanest.peak_rss_bytes:.2f} ({kolo.peak_rss_bytes / over_import:.2f})"
    return [
        model,
        f"{kolo.median_ms():.2f}" if kolo else "—",
        step_cell(best["eager"]),
        step_cell(best["compile"]),
        ratio_text(kolo, min(torch, key=Contestant.median_ms)) if both else "—",
        f"{kolo.peak_rss_bytes / 2**20:.0f}" if kolo else "—",
        f"{leanest.peak_rss_bytes / 2**20:.0f} ({over_import / 2**20:.0f})" if leanest else "—",
        memory_ratio if both else "—",
        start_cell(kolo),
        start_cell(best["eager"]),
        start_cell(best["compile"]),
    ]


def table(rows):
    lines = [COLUMNS, ["---"] + ["---:"] * (len(COLUMNS) - 1), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main():
    options = arguments()
    # OpenMP on a shared core can be tens of times slower, which would flatter whoever does not use it.
    if os.getloadavg()[0] > 0.5:
        print(f"load average {os.getloadavg()[0]:.1f}: the machine is not quiet, expect noise", file=sys.stderr)
    rows, everything = [], {}
    with tempfile.NamedTemporaryFile("w", prefix="bench-engine-", suffix=".log", delete=False) as log:
        print(f"the contestants' messages go to {log.name}", file=sys.stderr)
        for model in options.models.split(","):
            contestants = compete(model, options, log)
            rows.append(row(model, contestants))
            everything[model] = {
                one.name: {
                    "rounds_ms": one.rounds_ms,
                    "peak_rss_bytes": one.peak_rss_bytes,
                    "import_rss_bytes": one.import_rss_bytes,
                    "startup_ms": one.startup_ms,
                    "idle_cpu_ms": one.idle_cpu_ms,
                }
                for one in contestants
            }
    malloc = "default" if options.default_malloc else "tuned"
    print(f"{THREADS} threads, {options.rounds} rounds of {options.steps} steps, medians, PyTorch's malloc {malloc}.\n")
    print(table(rows))
    if options.report:
        Path(options.report).write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
