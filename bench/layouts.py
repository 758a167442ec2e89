"""Trains small jobs in many layouts, over several transports, and compares the digests of their weights.

Every job has one digest, whatever the layout: that is the promise. A layout that kolo refuses is listed with its reason, and
counts as refused, not as right.

    cargo build --release
    python bench/layouts.py --report layouts.json

With `--memory` it trains larger models in 26 layouts and compares the peak of each worker's memory with what was planned for it;
more than 5 % and 8 MiB apart is wrong.

    python bench/layouts.py --memory
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
    # Sizes that do not divide, and layers with fewer rows than tiles.
    "resnet18-tiles": """[model]
kind = "resnet18"
image = [3, 33, 30]
[data]
source = "synthetic:images"
samples = 24
batch = 8
grains = 4
[train]
steps = 2
[parallel]
slices = 2
tiles = [4, 2]
""",
    # Overlapping windows, kernels of 11 and 5 rows, and a classifier that the same workers share.
    "alexnet-layers": """[model]
kind = "alexnet"
image = [3, 79, 70]
classes = 10
[data]
source = "synthetic:images"
samples = 24
batch = 4
grains = 2
[train]
steps = 1
[parallel.layers]
"features.*" = { spatial = 2 }
"classifier.*" = { tensor = 2 }
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
# So large that shares of the model count beside the program itself.
LARGE = {
    "gpt": """[model]
kind = "gpt"
layers = 8
width = 256
heads = 8
context = 64
vocab = 2048
[data]
source = "synthetic:tokens"
samples = 64
holdout = 0
batch = 16
grains = 8
[train]
steps = 3
clip = 1.0
[parallel]
slices = 4
""",
    "resnet18": """[model]
kind = "resnet18"
image = [3, 96, 96]
classes = 10
[data]
source = "synthetic:images"
samples = 32
holdout = 0
batch = 16
grains = 2
[train]
steps = 2
[parallel]
tiles = [2, 2]
""",
    "mlp": """[model]
kind = "mlp"
inputs = 256
hidden = [1536, 1536, 1536, 1536]
classes = 10
[data]
source = "synthetic:features"
samples = 256
holdout = 0
batch = 64
grains = 8
[train]
steps = 3
[parallel]
slices = 2
""",
}
MEMORY_LAYOUTS = [
    ("gpt", 1, {}),
    ("gpt", 2, {}),
    ("gpt", 4, {}),
    ("gpt", 2, {"zero": 1}),
    ("gpt", 4, {"zero": 1}),
    ("gpt", 4, {"zero": 2}),
    ("gpt", 2, {"zero": 3}),
    ("gpt", 4, {"zero": 3}),
    ("gpt", 2, {"tensor": 2}),
    ("gpt", 4, {"tensor": 4}),
    ("gpt", 2, {"tensor": 2, "sequence": "tensor"}),
    ("gpt", 2, {"context": 2, "sequence": "heads"}),
    ("gpt", 2, {"pipeline": 2}),
    ("gpt", 4, {"pipeline": 4, "schedule": "gpipe"}),
    ("gpt", 2, {"pipeline": 2, "schedule": "interleaved", "chunks": 2}),
    ("gpt", 2, {"pipeline": 2, "schedule": "zero-bubble"}),
    ("gpt", 2, {"pipeline": 2, "schedule": "bidirectional"}),
    ("gpt", 4, {"pipeline": 2, "zero": 1}),
    ("gpt", 4, {"pipeline": 2, "zero": 3}),
    ("gpt", 4, {"tensor": 2, "pipeline": 2}),
    ("gpt", 8, {"tensor": 2, "pipeline": 2, "zero": 1}),
    ("resnet18", 2, {"spatial": [2, 1]}),
    ("resnet18", 4, {"spatial": [2, 2]}),
    ("mlp", 4, {"zero": 3}),
    ("mlp", 4, {"tensor": 2, "zero": 2}),
    ("mlp", 4, {"pipeline": 2, "schedule": "bidirectional", "zero": 1}),
]
MEMORY_SHARE_MAX, MEMORY_BYTES_MAX = 0.05, 8 << 20
# Tokens and layers have slices each.
for sequence in ["context", "heads"]:
    JOBS[f"gpt-{sequence}"] = JOBS["gpt"].replace(
        "slices = 4", f'slices = {4 if sequence == "context" else 2}\ntensor_slices = 2\nsequence = "{sequence}"'
    )
STAGES = {"gpt": 8, "gpt-context": 8, "gpt-heads": 8, "resnet18": 8, "resnet18-tiles": 2, "alexnet-layers": 1, "lstm": 2, "mlp": 4}
SLICES = {"gpt": 4, "gpt-context": 2, "gpt-heads": 2, "resnet18": 4, "resnet18-tiles": 2, "alexnet-layers": 1, "lstm": 2, "mlp": 4}
CONTEXTS = {"gpt-context": [1, 2, 4], "gpt-heads": [1, 2]}
SPATIALS = {"resnet18-tiles": [[1, 1], [2, 1], [4, 1], [1, 2], [2, 2], [4, 2]]}
# Workers that share the model without a key.
SHARED = {"alexnet-layers": 2}
GRAINS = {"resnet18-tiles": 4, "alexnet-layers": 2}


def layouts(job, zeros):
    """Every sensible combination on 1 to 8 workers."""
    contexts, spatials = CONTEXTS.get(job, [1]), SPATIALS.get(job, [[1, 1]])
    grains = GRAINS.get(job, 8)
    sizes = itertools.product([1, 2, 4, 8], [1, 2, 4], contexts, spatials, [1, 2, 4, 8], zeros)
    for workers, tensor, context, spatial, pipeline, zero in sizes:
        shared = tensor * context * spatial[0] * spatial[1] * pipeline * SHARED.get(job, 1)
        if workers % shared or tensor > SLICES[job] or pipeline > STAGES[job]:
            continue
        data = workers // shared
        if zero and data == 1 or data > grains:
            continue
        schedules = [("1f1b", 1)] if pipeline == 1 else [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1)]
        if pipeline > 1 and zero < 3 and grains // data > 1:
            schedules.append(("bidirectional", 1))
        if pipeline > 1 and 2 * pipeline <= STAGES[job] and (grains // data) % pipeline == 0:
            schedules.append(("interleaved", 2))
        for schedule, chunks in schedules:
            layout = {"tensor": tensor, "pipeline": pipeline, "zero": zero}
            if context > 1:
                layout |= {"context": context}
            if spatial != [1, 1]:
                layout |= {"spatial": spatial}
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
    return json.loads(report.read_text()), ""


def memory(arguments):
    """Compares what every worker holds with what was planned for it."""
    rows, wrong = [], 0
    print("| job | workers | layout | planned MiB | measured MiB | furthest off | |\n|---|---:|---|---|---|---:|---|")
    for job, workers, layout in MEMORY_LAYOUTS:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "job.toml").write_text(LARGE[job])
            # Over shared memory a rank's pages count for whoever reads them, too.
            report, reason = train(arguments.binary, folder, workers, layout, "tcp")
        if report is None:
            sys.exit(f"{job} -n {workers} {layout}: {reason}")
        ranks = (report.get("communication") or {}).get("ranks")
        pairs = [(rank["planned_bytes"], rank["peak_rss"]) for rank in ranks] if ranks else [(report["planned"]["bytes"], report["peak_bytes"]["rss"])]
        far = max(pairs, key=lambda pair: abs(pair[1] - pair[0]))
        off = far[1] - far[0]
        fits = abs(off) <= max(MEMORY_SHARE_MAX * far[0], MEMORY_BYTES_MAX)
        wrong += not fits
        rows.append({"job": job, "workers": workers, "layout": layout, "planned": [pair[0] for pair in pairs], "measured": [pair[1] for pair in pairs]})
        text = " ".join(f"{key}={value}" for key, value in layout.items())
        shown = [" ".join(f"{pair[side] / 2**20:.0f}" for pair in pairs) for side in (0, 1)]
        print(f"| {job} | {workers} | {text} | {shown[0]} | {shown[1]} | {off / 2**20:+.1f} MiB ({off / far[0]:+.0%}) | {'' if fits else 'TOO FAR'} |", flush=True)
    print(f"\n{len(rows)} layouts, {wrong} further than 5 % and 8 MiB from the plan")
    return rows, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--zeros", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--sample", type=int, help="so many layouts of each job, chosen by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--binary", default=KOLO)
    parser.add_argument("--memory", action="store_true", help="compare each worker's memory with its plan instead")
    parser.add_argument("--report")
    arguments = parser.parse_args()
    if arguments.memory:
        rows, wrong = memory(arguments)
        if arguments.report:
            Path(arguments.report).write_text(json.dumps(rows, indent=1))
        sys.exit(1 if wrong else 0)
    dice, rows, wrong = random.Random(arguments.seed), [], 0
    for job in arguments.jobs:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "job.toml").write_text(JOBS[job])
            alone, reason = train(arguments.binary, folder, 1, {}, "shm")
            if alone is None:
                sys.exit(f"{job}: {reason}")
            alone = alone["weights"]
            chosen = list(layouts(job, arguments.zeros))
            if arguments.sample:
                chosen = dice.sample(chosen, min(arguments.sample, len(chosen)))
            for workers, layout in chosen:
                transport = dice.choice(["shm", "tcp"])
                begin = time.time()
                report, reason = train(arguments.binary, folder, workers, layout, transport)
                outcome = "refused" if report is None else "same" if report["weights"] == alone else "OTHER"
                wrong += outcome != "same"
                rows.append({"job": job, "workers": workers, "transport": transport, **layout, "outcome": outcome, "reason": reason})
                text = " ".join(f"{key}={value}" for key, value in layout.items())
                print(f"{job:14} -n {workers} {transport:3} {text:55} {outcome} {reason} ({time.time() - begin:.1f} s)", flush=True)
    print(f"{len(rows)} layouts, {wrong} not the same")
    if arguments.report:
        Path(arguments.report).write_text(json.dumps(rows, indent=1))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
