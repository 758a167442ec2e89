"""A split GPT (bench/jobs/gpt.toml) on two workers against PyTorch's ways to split one, all over one host; prints a table.

Tensor parallelism against DTensor, a pipeline of two stages and eight micro-batches against torch.distributed.pipelining,
ZeRO-3 against FSDP2, all beside kolo's own data-parallel step, and what `slices = 4` costs one worker. Every round starts
each contestant once, in turn; a figure is the median over all steps of all rounds, the spread that of the rounds' medians.
Run it with an interpreter that has PyTorch, on a machine that does nothing else:

    cargo build --release && python bench/split.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from together import HERE, kolo


def torch_split(options, way):
    def measure():
        command = [sys.executable, str(HERE / "peers" / "torch_split.py"), way, "--steps", str(options.steps)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
        return json.loads(line)["step_ms"], 0.0

    return measure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kolo", default=str(HERE.parent / "target" / "release" / "kolo"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--no-peers", action="store_true", help="kolo alone")
    parser.add_argument("--report", help="file for every sample, as JSON")
    options = parser.parse_args()
    two = ["-n", "2", "--threads", "1"]
    data, pipes = "data", ["--set", "parallel.pipeline=2", "--set", "data.grains=8"]
    # What each is compared with.
    contestants = {
        data: (kolo(options, *two), data),
        "tensor = 2, slices = 2": (kolo(options, *two, "--set", "parallel.tensor=2", "--set", "parallel.slices=2"), data),
        "pipeline = 2, 1f1b, 8 micro-batches": (kolo(options, *two, *pipes), data),
        "zero = 3": (kolo(options, *two, "--set", "parallel.zero=3"), data),
        "one worker": (kolo(options, "--threads", "2"), "one worker"),
        "one worker, slices = 4": (kolo(options, "--threads", "2", "--set", "parallel.slices=4"), "one worker"),
    }
    if not options.no_peers:
        contestants |= {
            "PyTorch DTensor": (torch_split(options, "tensor"), "tensor = 2, slices = 2"),
            "PyTorch pipelining, 1F1B, 8 micro-batches": (torch_split(options, "pipeline"), "pipeline = 2, 1f1b, 8 micro-batches"),
            "PyTorch FSDP2": (torch_split(options, "fsdp"), "zero = 3"),
        }
    samples = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, (measure, _) in contestants.items():
            samples[name].append(measure()[0])
    medians = {name: statistics.median(time for times in rounds for time in times) for name, rounds in samples.items()}
    print("| contestant | ms/step | rounds | beside | ratio |\n|---|---|---|---|---|")
    for name, (_, other) in contestants.items():
        rounds = [statistics.median(times) for times in samples[name]]
        # Ours to a peer's, and a way to split to the data-parallel step.
        ratio = medians[other] / medians[name] if name.startswith("PyTorch") else medians[name] / medians[other]
        print(f"| {name} | {medians[name]:.1f} | {min(rounds):.1f}–{max(rounds):.1f} | {other} | {ratio:.2f} |")
    if options.report:
        Path(options.report).write_text(json.dumps({"samples_ms": samples}, indent=1) + "\n")


if __name__ == "__main__":
    main()
