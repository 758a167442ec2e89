"""Kills runs with SIGKILL at seeded moments and lets them go on, on another number of workers, until they end.

A run must end with the weights of one that nobody killed, nothing may hang, and no process may be left over. Prints a
histogram of what it took from the kill until all processes were gone, and of what it took from the start of the next run
until its first step. A seed repeats a run. With `--split` the model is a GPT that its workers share, each time in another
layout: tensor, pipeline, tokens, ZeRO, and all of them together.

    cargo build --release
    python bench/crashes.py --kills 200 --report crashes.json
    python bench/crashes.py --kills 60 --split
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KOLO = ROOT / "target" / "release" / "kolo"
HANG_S = 120
KILLS_PER_RUN = 4

JOB = """[job]
name = "crash"
[model]
kind = "mlp"
hidden = [256, 256]
[data]
source = "builtin:playground"
batch = 64
grains = 8
[train]
steps = {steps}
optimizer = {{ kind = "adamw" }}
[checkpoint]
every = "20 steps"
keep = 2
"""


SPLIT_JOB = """[job]
name = "crash"
[model]
kind = "gpt"
layers = 4
width = 24
heads = 4
context = 8
vocab = 37
dropout = 0.1
[data]
source = "synthetic:tokens"
samples = 256
batch = 16
grains = 8
holdout = 0
[train]
steps = {steps}
clip = 1.0
[parallel]
sequence = "context"
slices = 4
tensor_slices = 2
[checkpoint]
every = "10 steps"
keep = 2
"""
TRANSPORTS = random.Random(1)
# Workers, and what is set under [parallel].
LAYOUTS = [(workers, f"zero={zero}") for workers in (1, 2, 4, 4, 4) for zero in (0, 1, 2, 3)]
SPLIT_LAYOUTS = [
    (1, ""),
    (2, "zero=3"),
    (2, "tensor=2"),
    (2, "context=2"),
    (2, "pipeline=2 schedule=zero-bubble"),
    (4, "tensor=2 zero=3"),
    (4, "context=4"),
    (4, "context=2 tensor=2"),
    (4, "pipeline=4 schedule=bidirectional"),
    (4, "pipeline=2 schedule=interleaved chunks=2 zero=3"),
    (4, "pipeline=2 tensor=2 schedule=gpipe"),
    (8, "pipeline=2 tensor=2 zero=2"),
    (8, "pipeline=2 context=2 tensor=2"),
]


def train(folder, layout, *flags):
    workers, settings = layout
    # Each start may take another transport.
    flags += ("--transport", TRANSPORTS.choice(("shm", "tcp"))) if workers > 1 else ()
    settings = [word for setting in settings.split() for word in ("--set", f"parallel.{setting}")]
    command = [KOLO, "train", "job.toml", "--threads", "1", "-n", str(workers), *settings, *flags]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def processes(parent):
    try:
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids):
    begin = time.monotonic()
    while any(map(alive, pids)):
        if time.monotonic() - begin > HANG_S:
            raise RuntimeError(f"processes {[pid for pid in pids if alive(pid)]} are left over")
        time.sleep(0.002)
    return time.monotonic() - begin


def unharmed(folder):
    """The weights of a run that nobody kills, and how long it takes with 4 workers."""
    begin = time.monotonic()
    done = train(folder, (4, ""), "--no-out", "--quiet", "--report", "report.json").wait(timeout=HANG_S)
    if done:
        sys.exit("the job fails without any kill")
    return json.loads((Path(folder) / "report.json").read_text())["weights"], time.monotonic() - begin


def one_run(seed, job, layouts, expected, length_s, times):
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(job)
        for _ in range(KILLS_PER_RUN):
            child = train(folder, dice.choice(layouts), "--out", "run", "--resume", "--quiet")
            time.sleep(dice.random() * length_s * 1.1)
            pids = processes(child.pid)
            victim = dice.choice([child.pid, *pids])
            # A run that is over is no victim.
            hit = alive(victim)
            if hit:
                os.kill(victim, signal.SIGKILL)
            child.communicate(timeout=HANG_S)
            gone = wait_gone(pids)
            if hit:
                times.append(gone)
        child = train(folder, dice.choice(layouts), "--out", "run", "--resume", "--report", "report.json")
        output, _ = child.communicate(timeout=HANG_S)
        if child.returncode:
            return f"seed {seed}: the last run failed:\n{output}"
        report = json.loads((Path(folder) / "report.json").read_text())
        if report["weights"] != expected:
            return f"seed {seed}: other weights: {report['weights']}"
        verified = subprocess.run([KOLO, "ckpt", "verify", "run"], cwd=folder, capture_output=True, text=True)
        if verified.returncode:
            return f"seed {seed}: {verified.stderr}"
    return None


def histogram(times):
    bounds = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, float("inf")]
    low = 0
    for bound in bounds:
        count = sum(low <= value < bound for value in times)
        if count:
            print(f"  {low:>6} to {bound:>6} s  {count:>5}  {'#' * (60 * count // len(times))}")
        low = bound


def main():
    global KOLO
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kills", type=int, default=200)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--steps", type=int, help="of a run; 400, or 60 with --split")
    arguments.add_argument("--split", action="store_true", help="workers share the model")
    arguments.add_argument("--binary", default=KOLO)
    arguments.add_argument("--report")
    arguments = arguments.parse_args()
    KOLO = Path(arguments.binary).resolve()
    job, layouts, steps = (SPLIT_JOB, SPLIT_LAYOUTS, 60) if arguments.split else (JOB, LAYOUTS, 400)
    job = job.format(steps=arguments.steps or steps)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.toml").write_text(job)
        expected, length_s = unharmed(folder)
    print(f"a run takes {length_s:.2f} s; weights {expected}")
    times, failures = [], []
    runs = 0
    while len(times) < arguments.kills:
        number, runs = runs, runs + 1
        failure = one_run(arguments.seed + number, job, layouts, expected, length_s, times)
        if failure:
            failures.append(failure)
            print(failure)
    print(f"{len(times)} kills in {runs} runs, {len(failures)} failures; from a kill until all processes are gone:")
    histogram(times)
    if arguments.report:
        Path(arguments.report).write_text(json.dumps({"kills": len(times), "failures": failures, "gone_s": times}, indent=1))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
