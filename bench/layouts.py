"""Trains small jobs in many layouts, over several transports, and compares the digests of their weights.

Every job has one digest, whatever the layout: that is the promise. A layout that kolo refuses is listed with its reason, and
counts as refused, not as right.

    cargo build --release
    python bench/layouts.py --report layouts.json

With `--memory` it trains larger models in 26 layouts and compares the peak of each worker's memory with what was planned for it;
more than 5 % and 8 MiB apart is wrong.

    python bench/layouts.py --memory

With `--random N` it draws jobs and layouts that nobody listed: odd sizes, optimizers, frozen layers, schedules of their own or
damaged ones, ZeRO, recompute, buckets, threads, over shared memory, TCP, MPI and several hosts. Each must end with the weights of
one worker, or be refused before it starts with a hint. What it sends must be what was planned.

    python bench/layouts.py --random 1000 --seed 7
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import random_layouts

ROOT = Path(__file__).resolve().parent.parent
KOLO = ROOT / "target" / "release" / "kolo"
LIMIT_S = 300
# Random layouts that share a job.
LAYOUTS_OF_JOB = 4

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
    command = [binary, "train", "job.toml", "--quiet", "--device", "cpu", "--threads", "1", "--report", report, "-n", str(workers)]
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
            report, reason = train(arguments.binary, folder, workers, layout, arguments.transport)
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


def transports():
    """What this machine can start workers over, each as words before the command and words behind it."""
    shell = ROOT / "crates/cli/tests/faults/shell.sh"
    found = {
        "shm": lambda count: ([], ["-n", str(count), "--transport", "shm"]),
        "tcp": lambda count: ([], ["-n", str(count), "--transport", "tcp"]),
        "hosts": lambda count: ([], ["--hosts", f"127.0.0.1:{count - count // 2},127.0.0.2:{count // 2}", "--ssh", f"sh {shell}"]),
    }
    for name, flags in [("openmpi", ["--allow-run-as-root", "--oversubscribe"]), ("mpich", [])]:
        if mpirun := shutil.which(f"mpirun.{name}"):
            found[name] = lambda count, words=(mpirun, *flags): ([*words, "-n", str(count)], [])
    return found


def start(command, folder):
    """Exit code (None if it had to be ended), standard output and standard error."""
    child = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, errors = child.communicate(timeout=LIMIT_S)
        return child.returncode, output, errors
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, errors = child.communicate()
        return None, output, errors


def judge(code, errors, report, alone):
    """What became of a layout, and why."""
    if code is None:
        return "HANG", errors
    if code == 0:
        for key in ("weights", "loss", "metrics"):
            if report[key] != alone[key]:
                return "OTHER", f"{key}: {report[key]} is not {alone[key]}"
        return "same", ""
    # Each rank refuses under mpirun, and MPICH adds up their exit codes.
    if "panicked" in errors or "lost during" in errors or code < 0:
        return "CRASH", errors
    if "hint:" not in errors:
        return "NO HINT", errors
    return "refused", errors


def bytes_off(plan, report):
    """Whether the ranks of the first copy of the model sent what was planned for every step."""
    ranks = (plan.get("shared") or {}).get("ranks") or []
    sent = (report.get("communication") or {}).get("ranks") or []
    return [f"rank {one['rank']}: planned {one['sent_bytes']}, sent {sent[one['rank']]['sent_bytes']}" for one in ranks if one["sent_bytes"] != sent[one["rank"]]["sent_bytes"]]


def try_random(arguments):
    """Trains layouts by chance, some for each job."""
    ways, rows, wrong = transports(), [], 0
    if arguments.ways:
        ways = {name: way for name, way in ways.items() if name in arguments.ways}
    binary, alone = str(Path(arguments.binary).resolve()), None
    for number in range(arguments.random):
        if number % LAYOUTS_OF_JOB == 0:
            dice = random_layouts.Dice(f"{arguments.seed}/{number}")
            job, alone = random_layouts.job(dice), None
        dice = random_layouts.Dice(f"{arguments.seed}/{number}/layout")
        workers, settings, threads, way = random_layouts.layout(dice, job, list(ways))
        if arguments.only is not None and number != arguments.only:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "job.toml").write_text(random_layouts.job_file(job))
            row = {"number": number, "workers": workers, "threads": threads, "transport": way, "settings": settings}
            alone = alone or train_alone(binary, folder)
            row |= try_layout(binary, folder, row, ways, dice, alone)
        wrong += row["outcome"] not in ("same", "refused", "refused alone")
        rows.append(row)
        text = " ".join(f"{key.removeprefix('parallel.')}={value}" for key, value in settings.items() if "\n" not in str(value))
        print(f"{number:4} {job['model.kind']:8} -n {workers} {way:7} threads={threads} {text}: {row['outcome']} ({row['seconds']:.1f} s)", flush=True)
        if row["outcome"] != "same":
            print("     " + row["reason"].split("\n---")[0].strip().replace("\n", "\n     "), flush=True)
        if row["outcome"] not in ("same", "refused", "refused alone") or arguments.only is not None:
            print(random_layouts.job_file(job), flush=True)
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in sorted({row["outcome"] for row in rows})}
    print(f"{len(rows)} layouts: {counts}")
    return rows, wrong


def train_alone(binary, folder):
    """The report of one worker, or the outcome and the reason if there is none."""
    code, _, errors = start([binary, "train", "job.toml", "--quiet", "--device", "cpu", "--threads", "1", "--report", "report.json", "-n", "1"], folder)
    if code == 0:
        return json.loads((folder / "report.json").read_text()), None
    # A key that nobody knows is a mistake of this program's.
    refused = code in (1, 2) and "hint:" in errors and "unknown key" not in errors
    return None, {"outcome": "refused alone" if refused else "WRONG ALONE", "reason": errors}


def try_layout(binary, folder, row, ways, dice, alone):
    begin = time.time()
    alone, failed = alone
    if failed:
        return failed | {"seconds": time.time() - begin}
    command = [binary, "train", "job.toml", "--quiet", "--device", "cpu", "--threads", str(row["threads"])]
    settings = dict(row["settings"])
    if "\n" in str(settings.get("parallel.schedule", "")):
        text = settings["parallel.schedule"]
        text = random_layouts.mutated(dice, text) if dice.often(0.3) else text
        (folder / "own.txt").write_text(text)
        settings["parallel.schedule"] = "own.txt"
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={random_layouts.toml(value)}")]
    before, behind = ways[row["transport"]](row["workers"]) if row["workers"] > 1 else ([], ["-n", "1"])
    code, _, errors = start([*before, *command, "--report", "layout.json", *words, *behind], folder)
    report = json.loads((folder / "layout.json").read_text()) if code == 0 else {}
    outcome, reason = judge(code, errors, report, alone)
    if outcome == "OTHER":
        reason += "\n" + differing_tensors(binary, folder, [*before, *command, *words, *behind])
    if outcome == "same" and row["workers"] > 1:
        plan = [binary, "plan", "job.toml", "--by-rates", "--json", "--threads", str(row["threads"]), "-n", str(row["workers"])]
        code, output, errors = start([*plan, *words], folder)
        off = bytes_off(json.loads(output), report) if code == 0 else [errors]
        if off:
            outcome, reason = "BYTES", "\n".join(off)
    return {"outcome": outcome, "reason": reason, "seconds": time.time() - begin}


def differing_tensors(binary, folder, command):
    """The tensors that one worker and a layout have otherwise after one step."""
    one_step = ["--set", "train.steps=1", "--set", "train.eval_every=1000000"]
    start([binary, "train", "job.toml", "--quiet", "--device", "cpu", *one_step, "--out", "alone"], folder)
    start([*command, *one_step, "--out", "layout"], folder)
    _, output, errors = start([binary, "ckpt", "diff", "alone", "layout"], folder)
    return output + errors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--zeros", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--sample", type=int, help="so many layouts of each job, chosen by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--binary", default=KOLO)
    parser.add_argument("--memory", action="store_true", help="compare each worker's memory with its plan instead")
    parser.add_argument("--transport", default="shm", choices=["shm", "tcp"], help="of the workers whose memory is compared")
    parser.add_argument("--random", type=int, metavar="N", help="try so many random layouts of random jobs instead")
    parser.add_argument("--ways", nargs="+", help="start the random layouts in these ways alone: shm, tcp, hosts, openmpi, mpich")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="of the random layouts, this one alone")
    parser.add_argument("--report")
    arguments = parser.parse_args()
    if arguments.memory or arguments.random:
        rows, wrong = memory(arguments) if arguments.memory else try_random(arguments)
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
