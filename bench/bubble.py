"""Measures how long the ranks of a pipeline wait, from their timelines, and compares it with the formula.

The model is a GPT whose layers cost the same, with a small vocabulary, cut into stages of as many layers each. Each rank has one
thread, so there must be a core per rank. A rank is busy while a forward or backward pass of its stages runs, a step's pipeline
lasts from the first pass of any rank to the last, and the bubble is the rest of the ranks' time.

    cargo build --release
    python bench/bubble.py --report bubble.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KOLO = ROOT / "target" / "release" / "kolo"
LIMIT_S = 600
SKIPPED_STEPS = 2

JOB = """[model]
kind = "gpt"
layers = 8
width = {width}
heads = 4
context = 128
vocab = 32
[data]
source = "synthetic:tokens"
samples = 512
batch = {batch}
grains = {grains}
[train]
steps = {steps}
"""


def formula(ranks, micro_batches):
    return (ranks - 1) / (micro_batches + ranks - 1)


def union(spans):
    """The length of what some spans cover together."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def bubbles(trace, ranks):
    """The bubble of every step but the first ones."""
    steps = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "compute" and event["name"].split(" ")[0] in ("forward", "backward"):
            step = steps.setdefault(event["args"]["step"], {})
            step.setdefault(event["pid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for number in sorted(steps)[SKIPPED_STEPS:]:
        spans = steps[number]
        everything = [span for one in spans.values() for span in one]
        length = max(end for _, end in everything) - min(start for start, _ in everything)
        yield 1 - sum(union(spans[rank]) for rank in range(ranks)) / (ranks * length)


def run(arguments, schedule, micro_batches):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"width": arguments.width, "batch": 2 * micro_batches, "grains": micro_batches, "steps": arguments.steps}
        (folder / "job.toml").write_text(JOB.format(**sizes))
        command = [arguments.binary, "train", "job.toml", "--quiet", "--threads", "1", "-n", str(arguments.ranks)]
        command += ["--set", f"parallel.pipeline={arguments.ranks}", "--set", f"parallel.schedule={schedule}"]
        stages = [f"h.{8 * stage // arguments.ranks}" for stage in range(1, arguments.ranks)]
        command += ["--set", f"parallel.stages={json.dumps(stages)}", "--trace", "trace.json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            sys.exit(done.stderr)
        return list(bubbles(json.loads((folder / "trace.json").read_text()), arguments.ranks))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--binary", default=KOLO)
    parser.add_argument("--report")
    arguments = parser.parse_args()
    if (os.cpu_count() or 1) < arguments.ranks:
        sys.exit(f"{arguments.ranks} ranks need a core each, and there are {os.cpu_count()}")
    if os.getloadavg()[0] > 0.5:
        print(f"warning: the machine is not quiet (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    rows = []
    print("| schedule | micro-batches | formula | measured (median) | best step | off |\n|---|---:|---:|---:|---:|---:|")
    for schedule in arguments.schedules:
        for micro_batches in arguments.micro_batches:
            found = run(arguments, schedule, micro_batches)
            wanted, median = formula(arguments.ranks, micro_batches), statistics.median(found)
            row = {"schedule": schedule, "micro_batches": micro_batches, "formula": wanted, "measured": median, "best": min(found)}
            rows.append(row)
            off = f"{100 * (median / wanted - 1):+.0f} %"
            print(f"| {schedule} | {micro_batches} | {wanted:.1%} | {median:.1%} | {min(found):.1%} | {off} |", flush=True)
    if arguments.report:
        Path(arguments.report).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
