"""How long an elastic job stands still when a worker is killed, and how long until another one has taken its place: a model of 10 MB
(2.6 M parameters) with AdamW on four workers, with ZeRO 0, 1 and 3, over shared memory and TCP. Three kinds of job:

- `shrink`: nobody replaces the worker; from the kill until the next step is made. Three are left: two go on, and one is a spare.
- `restart`: the launcher starts another one, after a pause of 0.25 s; from the kill until four workers have made a step.
- `join`: the job has gone on without it; from the start of `kolo join` until four workers have made a step.

A step is made when its row is in `metrics.jsonl`, which is looked at every millisecond. Only rows count that come after the job said that
it continues (with four workers): those before may be of the old group. So a time is too long rather than too short, by a step at most.
Which worker is killed, and when, follows from the seed. Every job must end with the weights of one that ran undisturbed on one worker.
Wanted at the median: 1 s for `shrink`, 3 s for the others.

    cargo build --release && python bench/recovery.py --rounds 10 --report recovery.json
"""

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KOLO = ROOT / "target" / "release" / "kolo"
WORKERS = 4
HANG_S = 120
# What is wanted, and what a job takes undisturbed: enough that a replacement that is late comes before its end.
WANTED_S = {"shrink": 1, "restart": 3, "join": 3}
LENGTH_S = {"shrink": 2, "restart": 5, "join": 5}
# Parts of the job, between which a worker is killed.
KILLED = (0.1, 0.3)
PROBE_STEPS = 60

JOB = """[model]
kind = "mlp"
inputs = 512
hidden = [1024, 1024, 1024]
classes = 10
[data]
source = "synthetic:features"
samples = 4096
holdout = 0
batch = 64
grains = 8
[train]
log_every = 1
optimizer = { kind = "adamw", lr = 1e-3 }
"""
LOST = re.compile(r"(?:rank|worker) (\d+).* was lost")
CONTINUING = re.compile(r"continuing at step (\d+) with (\d+) worker.* as generation (\d+)")


class Job:
    """A job in a folder of its own, and when it was seen to say and to write what."""

    def __init__(self, binary, folder, steps, *flags):
        self.folder, self.said, self.rows, self.begin = folder, [], [], time.monotonic()
        (folder / "job.toml").write_text(JOB)
        command = [binary, "train", "job.toml", "--device", "cpu", "--threads", "1", "--set", f"train.steps={steps}", "--out", "out"]
        with (folder / "stderr").open("wb") as stderr:
            self.child = subprocess.Popen([*command, *flags], cwd=folder, stdout=subprocess.DEVNULL, stderr=stderr)

    def look(self):
        time.sleep(0.001)
        now, lines = time.monotonic(), (self.folder / "stderr").read_text(errors="replace").split("\n")
        self.said += [(now, line) for line in lines[len(self.said) : -1]]
        try:
            with (self.folder / "out" / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
                steps = re.findall(rb'{"step":(\d+),[^\n]*\n', file.read())
        except FileNotFoundError:
            return
        if steps and (not self.rows or self.rows[-1][1] != int(steps[-1])):
            self.rows.append((now, int(steps[-1])))

    def wait(self, what, condition):
        """Looks until the condition has a value."""
        while not (value := condition()):
            if self.child.poll() is not None or time.monotonic() - self.begin > HANG_S:
                raise RuntimeError(f"{what} has not come: {(self.folder / 'stderr').read_text()}")
            self.look()
        return value

    def reached(self, step):
        return next((when for when, of in self.rows if of >= step), None)

    def gone_on(self, after, workers):
        """When the job said that it continues, in which generation, and when that had made a step, if it has."""
        for said, line in self.said:
            words = CONTINUING.match(line)
            if words and said >= after and workers in (None, int(words[2])):
                made = next((when for when, step in self.rows if when >= said and step > int(words[1])), None)
                if made:
                    return said, int(words[3]), made
        return None

    def report(self):
        """The end of the job."""
        if self.child.wait(timeout=HANG_S):
            raise RuntimeError((self.folder / "stderr").read_text())
        return json.loads((self.folder / "out" / "report.json").read_text())


def undisturbed(binary, steps, workers):
    with tempfile.TemporaryDirectory() as folder:
        return Job(binary, Path(folder), steps, "-n", str(workers)).report()


def one_run(binary, folder, kind, zero, transport, steps, expected, dice):
    restarts = str(int(kind == "restart"))
    flags = ["--elastic", "--restarts", restarts, "--transport", transport, "--set", f"parallel.zero={zero}"]
    job = Job(binary, folder, steps, "-n", str(WORKERS), *flags)
    started = [job.child]
    try:
        moment = 1 + int(steps * dice.uniform(*KILLED))
        reached = job.wait("the step of the kill", lambda: job.reached(moment))
        children = Path(f"/proc/{job.child.pid}/task").glob("*/children")
        workers = sorted(int(pid) for words in children for pid in words.read_text().split())
        time.sleep(dice.random() * (reached - job.rows[0][0]) / moment)
        killed = begin = time.monotonic()
        os.kill(dice.choice(workers), signal.SIGKILL)
        if kind == "join":
            job.wait("a step without the worker", lambda: job.gone_on(killed, None))
            begin = time.monotonic()
            started.append(subprocess.Popen([binary, "join", "out"], cwd=folder, stdout=subprocess.DEVNULL))
        workers = None if kind == "shrink" else WORKERS
        said, number, made = job.wait("the step", lambda: job.gone_on(begin, workers))
        report = job.report()
        if report["weights"] != expected:
            raise RuntimeError(f"other weights: {report['weights']}, not {expected}")
        if any(process.wait(timeout=HANG_S) for process in started):
            raise RuntimeError("`kolo join` failed")
    finally:
        for process in started:
            process.kill()
            process.wait()
    noticed, rank = next((when, int(words[1])) for when, line in job.said if (words := LOST.match(line)))
    row = next(row for row in report["generations"] if row["generation"] == number)
    times = {"ms": made - begin, "said_ms": said - begin, "noticed_ms": noticed - killed}
    times = {name: round(seconds * 1e3, 1) for name, seconds in times.items()}
    return times | {name: row[name] for name in ("recovery_ms", "agreement_ms")} | {"rank": rank, "moment": moment}


def line(name, rows):
    times = sorted(row["ms"] for row in rows)
    ms = [statistics.median(times), times[math.ceil(0.9 * len(times)) - 1], times[-1]]
    ms += [statistics.median(row[name] for row in rows) for name in ("said_ms", "recovery_ms", "agreement_ms")]
    return f"| {name} | {len(rows)} | {' | '.join(f'{value:.0f}' for value in ms)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(WANTED_S))
    parser.add_argument("--zero", default="0,1,3")
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--rounds", type=int, default=10, help="each is one job for each row of the table")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--step-ms", type=float, help="decides how many steps a job has; measured")
    parser.add_argument("--binary", default=KOLO)
    parser.add_argument("--report", help="file for all times, as JSON")
    arguments = parser.parse_args()
    binary, kinds = Path(arguments.binary).resolve(), arguments.kinds.split(",")
    cases = [(kind, zero, by) for kind in kinds for zero in arguments.zero.split(",") for by in arguments.transports.split(",")]
    step_ms = arguments.step_ms or undisturbed(binary, PROBE_STEPS, WORKERS)["step_ms"]["median"]
    steps = {kind: int(LENGTH_S[kind] * 1e3 / step_ms) for kind in kinds}
    expected = {count: undisturbed(binary, count, 1)["weights"] for count in set(steps.values())}
    print(f"a step takes {step_ms:.1f} ms, jobs have {steps} steps", file=sys.stderr)
    results, failures = [], []
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        for case in cases:
            count, about = steps[case[0]], dict(zip(("kind", "zero", "transport", "seed"), [*case, seed]))
            try:
                with tempfile.TemporaryDirectory() as folder:
                    times = one_run(binary, Path(folder), *case, count, expected[count], random.Random(str(about)))
                results.append(about | times | {"load": os.getloadavg()[0]})
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                failures.append(about | {"failure": str(error)})
                print(failures[-1], file=sys.stderr)
        print(f"round {seed - arguments.seed + 1} of {arguments.rounds}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print("| kind | ZeRO | transport | runs | median ms | nine of ten | longest | said ms | recovery ms | agreement ms |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for case in [*cases, *((kind,) for kind in kinds)]:
        if rows := [row for row in results if (row["kind"], row["zero"], row["transport"])[: len(case)] == case]:
            print(line(" | ".join(case) if case[1:] else f"{case[0]}, wanted {WANTED_S[case[0]] * 1000} | all | all", rows))
    print(f"{len(results)} jobs ended with the weights of an undisturbed one, {len(failures)} failed")
    if arguments.report:
        Path(arguments.report).write_text(json.dumps({"step_ms": step_ms, "steps": steps, "runs": results, "failures": failures}, indent=1))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
