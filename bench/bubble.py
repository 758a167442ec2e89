"""Measures how long the ranks of a pipeline wait, from their timelines, and compares it with the formula.

The model is a GPT whose layers cost the same, with a small vocabulary, cut into stages of as many layers each. Each rank has one
thread, so there must be a core per rank. A rank is busy while a forward or backward pass of its stages runs, from its first op to its last, a step's pipeline
lasts from the first pass of any rank to the last, and the bubble is the rest of the ranks' time.

    cargo build --release
    python bench/bubble.py --report bubble.json

Passes of one kind do not all take the same time, and whoever takes longer keeps the other waiting, which the formula does not know. The column
*as timed* plays each step through again with every pass as long as it was and messages that take no time: what is measured beyond it is kolo's
own doing, what it is beyond the formula is the machine's.

On a machine that others use, passes last as long as ranks are kept from their cores. `--replay` takes the order of passes from the
timeline, and of each op the shortest of its durations; it plays the ranks' passes through again, each as soon as what it waits for is
there, as if every rank had a core and messages took no time.

    python bench/bubble.py --replay
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
    """The bubble of every step but the first ones, measured and as timed. A pass is busy from the start of its first op to the end of its last: what
    lies between two ops of a pass is the timeline's own work, and nobody is waited for there."""
    steps = {}
    for event in trace["traceEvents"]:
        kind = event["name"].split(" ")[0]
        if event.get("cat") == "compute" and kind in ("forward", "backward"):
            span = (event["ts"], event["ts"] + event["dur"], (event["tid"], kind))
            steps.setdefault(event["args"]["step"], {}).setdefault(event["pid"], []).append(span)
    for number in sorted(steps)[SKIPPED_STEPS:]:
        spans = {rank: joined(sorted(found)) for rank, found in steps[number].items()}
        everything = [span for one in spans.values() for span in one]
        length = max(end for _, end, _ in everything) - min(start for start, _, _ in everything)
        measured = 1 - sum(union((start, end) for start, end, _ in spans[rank]) for rank in range(ranks)) / (ranks * length)
        yield measured, played([[(kind, end - start) for start, end, kind in spans[rank]] for rank in range(ranks)])


def joined(ops):
    """Ops of one pass that follow each other as one span. What runs once before all grains is no pass."""
    found = []
    for start, end, key in ops:
        if found and found[-1][2] == key:
            found[-1] = (found[-1][0], max(end, found[-1][1]), key)
        else:
            found.append((start, end, key))
    longest = max(end - start for start, end, _ in found)
    return [(start, end, kind) for start, end, (_, kind) in found if end - start > longest / 20]


def played(orders):
    """The bubble if every rank runs its passes, kinds with lengths, in their order, each as soon as its neighbour's is there."""
    ranks = len(orders)
    ends, clocks, places = {}, [0.0] * ranks, [0] * ranks
    counts = [{"forward": 0, "backward": 0} for _ in range(ranks)]
    while any(place < len(order) for place, order in zip(places, orders)):
        before = list(places)
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, length = order[places[rank]]
                grain = counts[rank][kind]
                other = rank - 1 if kind == "forward" else rank + 1
                waits = (kind, other, grain) if 0 <= other < ranks else None
                if waits and waits not in ends:
                    break
                clocks[rank] = ends[kind, rank, grain] = max(clocks[rank], ends.get(waits, 0.0)) + length
                counts[rank][kind] += 1
                places[rank] += 1
        if places == before:
            sys.exit("the passes of the timeline wait for each other")
    return 1 - sum(length for order in orders for _, length in order) / (ranks * max(clocks))


def passes(trace, rank, step):
    """A rank's passes of a step in their order: (kind, names and durations of its ops). A pass has a slot of its own."""
    events = [event for event in trace["traceEvents"] if event.get("cat") == "compute" and event["pid"] == rank]
    events = [event for event in events if event["args"]["step"] == step]
    found, last = [], None
    for event in sorted(events, key=lambda event: event["ts"]):
        kind = event["name"].split(" ")[0]
        if kind not in ("forward", "backward"):
            continue
        if (event["tid"], kind) != last:
            found.append((kind, []))
            last = event["tid"], kind
        found[-1][1].append((event["name"], event["dur"]))
    # What runs once before all grains is no pass.
    longest = {wanted: max(len(ops) for kind, ops in found if kind == wanted) for wanted in ("forward", "backward")}
    return [(kind, ops) for kind, ops in found if 2 * len(ops) > longest[kind]]


def shortest(passes):
    """How long a pass lasts if each of its ops takes the shortest of its times."""
    times = {}
    for ops in passes:
        seen = {}
        for name, duration in ops:
            seen[name] = seen.get(name, 0) + 1
            times.setdefault((name, seen[name]), []).append(duration)
    # Some are too short to be in every pass.
    return sum(min(all_times) for all_times in times.values() if 2 * len(all_times) > len(passes))


def replayed(trace, ranks):
    """The bubble of the passes as the timeline has them, with the shortest duration of every op, in which nobody kept the rank from its core."""
    steps = sorted({event["args"]["step"] for event in trace["traceEvents"] if event.get("cat") == "compute"})[SKIPPED_STEPS:]
    orders, lengths = [], []
    for rank in range(ranks):
        all_passes = [passes(trace, rank, step) for step in steps]
        orders.append([kind for kind, _ in all_passes[0]])
        length = {}
        for wanted in ("forward", "backward"):
            length[wanted] = shortest([ops for one in all_passes for kind, ops in one if kind == wanted])
        lengths.append(length)
    return played([[(kind, lengths[rank][kind]) for kind in order] for rank, order in enumerate(orders)])


def run(arguments, schedule, micro_batches):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"width": arguments.width, "batch": arguments.samples * micro_batches, "grains": micro_batches, "steps": arguments.steps}
        (folder / "job.toml").write_text(JOB.format(**sizes))
        command = [arguments.binary, "train", "job.toml", "--quiet", "--device", "cpu", "--threads", "1", "-n", str(arguments.ranks)]
        command += ["--set", f"parallel.pipeline={arguments.ranks}", "--set", f"parallel.schedule={schedule}"]
        stages = [f"h.{8 * stage // arguments.ranks}" for stage in range(1, arguments.ranks)]
        command += ["--set", f"parallel.stages={json.dumps(stages)}", "--trace", "trace.json"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            sys.exit(done.stderr)
        trace = json.loads((folder / "trace.json").read_text())
        return [(replayed(trace, arguments.ranks),) * 2] if arguments.replay else list(bubbles(trace, arguments.ranks))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b"])
    parser.add_argument("--micro-batches", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--samples", type=int, default=2, help="of a micro-batch: the more, the less a moment of disturbance counts")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--replay", action="store_true", help="for a machine that is not quiet")
    parser.add_argument("--binary", default=KOLO)
    parser.add_argument("--report")
    arguments = parser.parse_args()
    if (os.cpu_count() or 1) < arguments.ranks and not arguments.replay:
        sys.exit(f"{arguments.ranks} ranks need a core each, and there are {os.cpu_count()}")
    if os.getloadavg()[0] > 0.5 and not arguments.replay:
        print(f"warning: the machine is not quiet (load {os.getloadavg()[0]:.1f})", file=sys.stderr)
    rows = []
    print("| schedule | micro-batches | formula | as timed (median) | measured (median) | best step | off the formula | off as timed |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for schedule in arguments.schedules:
        for micro_batches in arguments.micro_batches:
            found, timed = zip(*run(arguments, schedule, micro_batches))
            wanted, median, own = formula(arguments.ranks, micro_batches), statistics.median(found), statistics.median(timed)
            row = {"schedule": schedule, "micro_batches": micro_batches, "formula": wanted, "as_timed": own, "measured": median, "best": min(found)}
            rows.append(row)
            off = [f"{100 * (median / one - 1):+.0f} %" for one in (wanted, own)]
            print(f"| {schedule} | {micro_batches} | {wanted:.1%} | {own:.1%} | {median:.1%} | {min(found):.1%} | {off[0]} | {off[1]} |", flush=True)
    if arguments.report:
        Path(arguments.report).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
