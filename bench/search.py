"""Measures the layouts that `kolo plan --search` ranks on this machine, and says how far the first is from the fastest.

Every layout of the search is trained for some steps by `kolo bench train`, taking turns in each round. Wanted: the first one
takes at most 5 % longer than the fastest. With `--cluster` it also compares the step time that `kolo simulate` says of a cluster
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


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default="gpt,gpt-deep,mlp", help="comma-separated names of files in bench/jobs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
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


def main():
    args = arguments()
    print("| job | layouts | first ms | fastest ms | first / fastest | simulated / measured |\n|---|---:|---:|---:|---:|---:|")
    for name in args.jobs.split(","):
        job = BENCH / "jobs" / f"{name}.toml"
        found = json.loads(run(args.kolo, "plan", job, "-n", args.workers, "--search", "--json"))
        layouts = found["layouts"]
        with tempfile.TemporaryDirectory() as folder:
            times = measure(args, job, layouts, Path(folder), args.rounds)
            # The least of ten noisy medians is lucky: the first and the fastest are measured again, against each other.
            fastest = times.index(min(times))
            times = measure(args, job, [layouts[0], layouts[fastest]], Path(folder), 2 * args.rounds)
            ratio = f"{simulate(args, job, layouts[0], Path(folder)) / times[0]:.2f}" if args.cluster else "-"
        print(f"| {name} | {len(layouts)} | {times[0]:.2f} | {min(times):.2f} | {times[0] / min(times):.3f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main()
