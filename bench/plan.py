"""Compares what `kolo plan` says of ten jobs and 24 layouts of them with what `kolo bench train` and `kolo train` measure, taking turns in one run.

A round plans every job and then times its steps. The table has the median over the rounds of the planned and of the measured
time of a step, their ratio, and the planned memory beside the most that the process had resident, evaluation and all. On a
machine that others use, compare the shortest times (`--shortest`): what disturbs makes both longer, but not alike.

    cargo build --release && python bench/plan.py --rounds 3
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
# Two workers, with these keys of `[parallel]`.
LAYOUTS = [
    ("gpt", "zero=1"), ("gpt", "zero=2"), ("gpt", "zero=3"), ("gpt", "tensor=2 slices=2"),
    ("gpt", "tensor=2 slices=2 sequence=tensor"), ("gpt", "context=2 slices=2 sequence=heads"), ("gpt", "pipeline=2"),
    ("gpt", "pipeline=2 schedule=gpipe"), ("gpt", "pipeline=2 schedule=zero-bubble"), ("gpt-deep", ""),
    ("gpt-deep", "pipeline=2 schedule=interleaved chunks=2"), ("gpt-deep", "tensor=2 slices=2"), ("gpt-wide", ""),
    ("gpt-wide", "zero=1"), ("gpt-wide", "tensor=2 slices=2"), ("gpt-wide", "pipeline=2"), ("mlp-wide", "data.grains=2"),
    ("mlp-wide", "tensor=2 slices=2"), ("cnn", ""), ("cnn", "zero=1"), ("resnet18", ""), ("alexnet", "zero=1"), ("lstm", ""),
    ("gpt", ""),
]  # fmt: skip


def flags_of(layout):
    """A key of another table than `[parallel]` is written with the table's name."""
    named = (key if "." in key.split("=")[0] else f"parallel.{key}" for key in layout.split())
    return ["-n", "2", *(word for key in named for word in ("--set", key))]


# Jobs and the flags they are run with.
JOBS = [
    (name, [])
    for name in "alexnet resnet50 resnet18 cnn lstm gpt gpt-deep gpt-wide mlp-tiny mlp-wide mlp".split()
] + [(job, flags_of(layout)) for job, layout in LAYOUTS]
MEBIBYTE = 1 << 20
# Memory is right within this part of it, or so many bytes.
MEMORY_PART, MEMORY_BYTES = 0.05, 8 * MEBIBYTE


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", help="comma-separated names of files in bench/jobs; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shortest", action="store_true", help="compare the shortest times instead of the medians")
    parser.add_argument("--report", help="write the figures as JSON to this file")
    return parser.parse_args()


def kolo(*words):
    done = subprocess.run([str(KOLO), *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"kolo {' '.join(map(str, words))}\n{done.stderr}")
    return done.stdout


def measure(job, flags, steps, folder):
    """One round of one job: planned and measured milliseconds, planned and measured bytes."""
    path = BENCH / "jobs" / f"{job}.toml"
    plan = json.loads(kolo("plan", path, "--json", *flags))
    report = folder / "report.json"
    kolo("bench", "train", path, "--steps", steps, "--report", report, *flags)
    bench = json.loads(report.read_text())
    # Few steps and an evaluation: the memory of a whole run.
    kolo("train", path, "--quiet", "--set", "train.steps=3", "--out", folder / "out", "--report", report, *flags)
    rss = json.loads(report.read_text())["peak_bytes"]["rss"]
    times = bench["step_ms"]
    return plan["step_ms"], plan["step_ms_by_rates"], times["median"], times["min"], plan["memory"]["total"], rss


def row(name, rounds, shortest):
    planned, by_rates, median, least, bytes_planned, rss = zip(*rounds)
    middle = min if shortest else statistics.median
    measured = min(least) if shortest else statistics.median(median)
    memory = abs(max(rss) - bytes_planned[0])
    return {
        "job": name, "planned_ms": middle(planned), "measured_ms": measured,
        "ratio": measured / middle(planned), "ratio_by_rates": measured / middle(by_rates),
        "planned_mib": bytes_planned[0] / MEBIBYTE, "rss_mib": max(rss) / MEBIBYTE,
        "memory_right": memory <= max(MEMORY_PART * max(rss), MEMORY_BYTES),
    }  # fmt: skip


def main():
    args = arguments()
    wanted = args.jobs.split(",") if args.jobs else [job for job, _ in JOBS]
    jobs = [(job, flags) for job, flags in JOBS if job in wanted]
    rounds = {(job, *flags): [] for job, flags in jobs}
    for number in range(args.rounds):
        for job, flags in jobs:
            with tempfile.TemporaryDirectory() as folder:
                rounds[(job, *flags)].append(measure(job, flags, args.steps, Path(folder)))
            planned, _, measured, *_ = rounds[(job, *flags)][-1]
            print(f"{' '.join((job, *flags))}: {planned:.3f} ms planned, {measured:.3f} measured", file=sys.stderr, flush=True)
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr)
    rows = [row(" ".join(key), times, args.shortest) for key, times in rounds.items()]
    print("| job | planned ms | measured ms | measured / planned | by rates alone | planned MiB | peak MiB | memory |")
    print("|---|---:|---:|---:|---:|---:|---:|---|")
    for r in rows:
        print(
            f"| {r['job']} | {r['planned_ms']:.3f} | {r['measured_ms']:.3f} | {r['ratio']:.2f} | {r['ratio_by_rates']:.2f} "
            f"| {r['planned_mib']:.1f} | {r['rss_mib']:.1f} | {'right' if r['memory_right'] else 'wrong'} |"
        )
    errors = [max(r["ratio"], 1 / r["ratio"]) - 1 for r in rows]
    print(f"\nerror of the time: median {statistics.median(errors):.0%}, largest {max(errors):.0%}")
    if args.report:
        Path(args.report).write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
