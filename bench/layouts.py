"""Trains small jobs in many layouts, over several transports, and compares the digests of their weights.

Every job has one digest, whatever the layout: that is the promise. A layout that kolo refuses is listed with its reason, and
counts as refused, not as right.

    cargo build --release
    python bench/layouts.py --report layouts.json
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KOLO = ROOT / "target" / "release" / "kolo"
LIMIT_S = 300

JOBS = {
    "gpt": """[model]
kind = "gpt"
layers = 8
width = 48
heads = 6
context = 16
vocab = 53
dropout = 0.1
[data]
source = "synthetic:tokens"
samples = 64
batch = 16
grains = 8
[train]
steps = 4
clip = 1.0
[parallel]
slices = 4
""",
    "resnet18": """[model]
kind = "resnet18"
image = [3, 32, 32]
[data]
source = "synthetic:images"
samples = 24
batch = 8
grains = 8
[train]
steps = 2
[parallel]
slices = 4
""",
    "lstm": """[model]
kind = "lstm"
layers = 2
width = 24
[data]
source = "builtin:waves"
batch = 16
grains = 8
[train]
steps = 4
optimizer = { kind = "lars" }
[parallel]
slices = 2
""",
    "mlp": """[model]
kind = "mlp"
hidden = [65, 40, 33]
[data]
source = "builtin:digits"
batch = 32
grains = 8
[train]
steps = 6
optimizer = { kind = "lamb" }
clip = 0.5
[parallel]
slices = 4
""",
}
# Tokens and layers have slices each.
for sequence in ["context", "heads"]:
    JOBS[f"gpt-{sequence}"] = JOBS["gpt"].replace(
        "slices = 4", f'slices = {4 if sequence == "context" else 2}\ntensor_slices = 2\nsequence = "{sequence}"'
    )
STAGES = {"gpt": 8, "gpt-context": 8, "gpt-heads": 8, "resnet18": 8, "lstm": 2, "mlp": 4}
SLICES = {"gpt": 4, "gpt-context": 2, "gpt-heads": 2, "resnet18": 4, "lstm": 2, "mlp": 4}
CONTEXTS = {"gpt-context": [1, 2, 4], "gpt-heads": [1, 2]}


def layouts(job, zeros):
    """Every sensible combination on 1 to 8 workers."""
    contexts = CONTEXTS.get(job, [1])
    sizes = itertools.product([1, 2, 4, 8], [1, 2, 4], contexts, [1, 2, 4, 8], zeros)
    for workers, tensor, context, pipeline, zero in sizes:
        if workers % (tensor * context * pipeline) or tensor > SLICES[job] or pipeline > STAGES[job]:
            continue
        data = workers // (tensor * context * pipeline)
        if zero and data == 1:
            continue
        schedules = [("1f1b", 1)] if pipeline == 1 else [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1)]
        if pipeline > 1 and 2 * pipeline <= STAGES[job] and (8 // data) % pipeline == 0:
            schedules.append(("interleaved", 2))
        for schedule, chunks in schedules:
            layout = {"tensor": tensor, "pipeline": pipeline, "zero": zero}
            if context > 1:
                layout |= {"context": context}
            if pipeline > 1:
                layout |= {"schedule": schedule, "chunks": chunks}
            yield workers, layout


def train(binary, folder, workers, layout, transport):
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [binary, "train", "job.toml", "--quiet", "--threads", "1", "--report", report, "-n", str(workers)]
    command += [word for key, value in layout.items() for word in ("--set", f"parallel.{key}={value}")]
    if workers > 1:
        command += ["--transport", transport]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        return None, done.stderr.strip().splitlines()[0] if done.stderr.strip() else f"exit code {done.returncode}"
    return json.loads(report.read_text())["weights"], ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--zeros", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--sample", type=int, help="so many layouts of each job, chosen by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--binary", default=KOLO)
    parser.add_argument("--report")
    arguments = parser.parse_args()
    dice, rows, wrong = random.Random(arguments.seed), [], 0
    for job in arguments.jobs:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "job.toml").write_text(JOBS[job])
            alone, reason = train(arguments.binary, folder, 1, {}, "shm")
            if alone is None:
                sys.exit(f"{job}: {reason}")
            chosen = list(layouts(job, arguments.zeros))
            if arguments.sample:
                chosen = dice.sample(chosen, min(arguments.sample, len(chosen)))
            for workers, layout in chosen:
                transport = dice.choice(["shm", "tcp"])
                begin = time.time()
                digest, reason = train(arguments.binary, folder, workers, layout, transport)
                outcome = "refused" if digest is None else "same" if digest == alone else "OTHER"
                wrong += outcome != "same"
                rows.append({"job": job, "workers": workers, "transport": transport, **layout, "outcome": outcome, "reason": reason})
                text = " ".join(f"{key}={value}" for key, value in layout.items())
                print(f"{job:9} -n {workers} {transport:3} {text:55} {outcome} {reason} ({time.time() - begin:.1f} s)", flush=True)
    print(f"{len(rows)} layouts, {wrong} not the same")
    if arguments.report:
        Path(arguments.report).write_text(json.dumps(rows, indent=1))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
