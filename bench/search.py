"""Measures the layouts that `kolo plan --search` ranks on this machine, and says how far the first is from the fastest.

Every layout of the search is trained for some steps by `kolo bench train`, taking turns in each round. Wanted: the first one
takes at most 5 % longer than the fastest. With `--all` every layout that the search tries and that fits is trained once, and the
fastest of them again, against the first: a second row has those alone that keep the job's bits, among which `kolo train --auto`
chooses. With `--cluster` it also compares the step time that `kolo simulate` says of a cluster
file (written by `kolo bench comm --write`) with the measured one; wanted: within 15 %.

    cargo build --release && python bench/search.py --jobs gpt,mlp --workers 2 --rounds 3
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).resolve().parent
KOLO = BENCH.parent / "target" / "release" / "kolo"
LAYOUTS_MAX = 10000
# Of all layouts, so many that were fast once are measured again.
NEAR_MAX = 5
# Keys that are part of what a job computes.
OF_THE_JOB = {f"parallel.{key}" for key in "slices tensor_slices sequence context".split()} | {"data.grains"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="gpt,gpt-deep,mlp", help="comma-separated names of files in bench/jobs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--all", action="store_true", help="all layouts that fit, not the ten that the search shows")
    parser.add_argument("--cluster", help="a cluster file of this machine: the simulated step beside the measured one")
    parser.add_argument("--kolo", default=str(KOLO))
    return parser.parse_args()


def run(program, *words):
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"kolo {' '.join(map(str, words))}\n{done.stderr}")
    return done.stdout


def flags(layout):
    return [word for one in layout["set"] for word in ("--set", one)]


def measure(args, job, layouts, folder, rounds):
    """Median milliseconds of each layout over all rounds."""
    times = [[] for _ in layouts]
    for _ in range(rounds):
        for at, layout in enumerate(layouts):
            report = folder / "report.json"
            run(args.kolo, "bench", "train", job, "-n", args.workers, "--steps", args.steps, "--report", report, *flags(layout))
            times[at].append(json.loads(report.read_text())["step_ms"]["median"])
    return [statistics.median(one) for one in times]


def simulate(args, job, layout, folder):
    out = folder / "simulated.json"
    run(args.kolo, "simulate", job, "--cluster", args.cluster, "-n", args.workers, "--json", out, *flags(layout))
    return json.loads(out.read_text())["step_ms"]


def search(args, job):
    words = ["--layouts", LAYOUTS_MAX] if args.all else []
    return json.loads(run(args.kolo, "plan", job, "-n", args.workers, "--search", "--json", *words))["layouts"]


def keeps_bits(args, job):
    """Whether a layout keeps the grains and slices of the job, and how it splits tokens."""
    own = json.loads(run(args.kolo, "plan", job, "-n", args.workers, "--why", "--json"))["layouts"][0]
    kept = {one for one in own["set"] if one.split("=")[0] in OF_THE_JOB}
    return lambda layout: kept <= set(layout["set"])


def compare(args, job, name, layouts, times, folder):
    """Prints a row: the first against the fastest of these, both measured again, as the least of many noisy medians is lucky."""
    others = sorted(range(1, len(layouts)), key=times.__getitem__)
    near = others[: NEAR_MAX if args.all else 1]
    again = measure(args, job, [layouts[at] for at in [0, *near]], folder, 2 * args.rounds)
    first, fastest = again[0], min(again)
    ratio = f"{simulate(args, job, layouts[0], folder) / first:.2f}" if args.cluster else "-"
    print(f"| {name} | {len(layouts)} | {first:.2f} | {fastest:.2f} | {first / fastest:.3f} | {ratio} |", flush=True)
    if args.all:
        best = layouts[[0, *near][again.index(fastest)]]
        print(f"{name}: first {' '.join(layouts[0]['set'])}; fastest {' '.join(best['set'])}", file=sys.stderr)


def main():
    args = arguments()
    print("| job | layouts | first ms | fastest ms | first / fastest | simulated / measured |\n|---|---:|---:|---:|---:|---:|")
    for name in args.jobs.split(","):
        job = BENCH / "jobs" / f"{name}.toml"
        layouts = search(args, job)
        with tempfile.TemporaryDirectory() as folder:
            times = measure(args, job, layouts, Path(folder), 1 if args.all else args.rounds)
            compare(args, job, name, layouts, times, Path(folder))
            if not args.all:
                continue
            kept = keeps_bits(args, job)
            kept = [(layout, time) for layout, time in zip(layouts, times) if kept(layout)]
            if kept:
                compare(args, job, f"{name}, its bits", *map(list, zip(*kept)), Path(folder))


if __name__ == "__main__":
    main()
