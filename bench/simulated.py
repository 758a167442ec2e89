"""Compares steps that `kolo simulate` plays on a file of this machine with steps that its workers run: how long, and in which order.

Measures the links between so many workers (`kolo bench comm --write`) and one of them as a device (`kolo bench device --write`).
Then it simulates some layouts of a job and trains each for some steps, taking turns in each round. Wanted: the simulated time
within 15 % of the measured median. The second ratio is that of a device that was calibrated on a run of the first layout
(`kolo plan --calibrate`): what is left of the error when the rate of this job's kernels is known. Where workers leave cores free,
the cluster file is made to say that exchanges go on beside computing.

It also compares the order of events, per rank, in a step of `kolo train --trace` and of `kolo simulate --trace`: passes, by
direction, stage and micro-batch; exchanges inside layers, by kind and bytes; messages between stages; sums and shares of gradients
and weights. Wanted: the same. Each worker has one thread then, as lanes that compute beside each other have no one order.

    cargo build --release && python bench/simulated.py --workers 8 --rounds 3
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

BENCH = Path(__file__).resolve().parent
KOLO = BENCH.parent / "target" / "release" / "kolo"
COLLECTIVES = "all_reduce,reduce_scatter,all_gather,all_to_all,send"
SIZES = "64,2K,16K,64K,256K,1M,8M"
# Sums are exchanged tensor by tensor with the padding between them.
BYTES_PART = 0.01


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8, help="a power of two")
    parser.add_argument("--job", default="gpt", help="the name of a file in bench/jobs, of a model with `layers`")
    parser.add_argument("--layers", type=int, default=8, help="of the model: enough for the stages of all ranks")
    parser.add_argument("--threads", type=int, default=1, help="of each worker; all cores are used if that is their number")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="more keys of the job")
    parser.add_argument("--order-only", action="store_true", help="compare orders alone, which any machine can")
    parser.add_argument("--report", help="write the figures as JSON to this file")
    parser.add_argument("--kolo", default=str(KOLO))
    return parser.parse_args()


def layouts_of(workers, layers):
    """Names and keys of some layouts of so many workers."""
    grains = max(workers, 8)
    whole = {"data.batch": 4 * grains, "data.grains": grains, "model.layers": layers}
    pipeline, chunks = min(4, workers), "parallel.schedule=interleaved parallel.chunks=2"
    keys = [("data", ""), ("zero=1", "parallel.zero=1")]
    keys.append((f"pipeline={pipeline}", f"parallel.pipeline={pipeline} parallel.schedule=1f1b"))
    keys.append((f"pipeline={pipeline}, interleaved", f"parallel.pipeline={pipeline} {chunks}"))
    if workers >= 4:
        keys.append(("tensor=2, pipeline=2", "parallel.tensor=2 parallel.slices=2 parallel.pipeline=2"))
    keys.append(("tensor=2", "parallel.tensor=2 parallel.slices=2"))
    return [(name, [*(f"{key}={value}" for key, value in whole.items()), *more.split()]) for name, more in keys]


def run(args, *words):
    done = subprocess.run([args.kolo, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"kolo {' '.join(map(str, words))}\n{done.stderr}")
    return done.stdout


def flags(keys):
    return [word for key in keys for word in ("--set", key)]


def simulated_ms(args, job, keys, cluster, device, folder):
    out = folder / "simulated.json"
    run(args, "simulate", job, "--cluster", cluster, "--device", device, "-n", args.workers, "--json", out, *flags(keys))
    return json.loads(out.read_text())["step_ms"]


def compare_times(args, job, layouts, cluster, folder):
    """A row for each layout: simulated and measured milliseconds."""
    device, calibrated = folder / "device.toml", folder / "calibrated.toml"
    report = folder / "report.json"
    run(args, "bench", "device", "-n", args.workers, "--threads", args.threads, "--write", device)
    own = ["-n", args.workers, "--threads", args.threads]
    first = flags([*layouts[0][1], f"train.steps={args.steps}"])
    run(args, "train", job, "--device", "cpu", *own, "--quiet", "--no-out", "--report", report, *first)
    run(args, "plan", "--calibrate", report, "--entry", calibrated)
    measured = defaultdict(list)
    for number in range(args.rounds):
        for name, keys in layouts:
            run(args, "bench", "train", job, "--device", "cpu", *own, "--steps", args.steps, "--report", report, *flags(keys))
            measured[name].append(json.loads(report.read_text())["step_ms"]["median"])
        print(f"round {number + 1} of {args.rounds} done", file=sys.stderr, flush=True)
    rows = []
    for name, keys in layouts:
        by_rates, by_run = (simulated_ms(args, job, keys, cluster, one, folder) for one in (device, calibrated))
        median = statistics.median(measured[name])
        rows.append({"layout": name, "simulated_ms": by_rates, "calibrated_ms": by_run, "measured_ms": median})
    return rows


def spans_of(path):
    """By rank or role, in order: (name of the thread, event)."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    threads = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    spans = defaultdict(list)
    for event in sorted((one for one in events if one["ph"] == "X"), key=lambda one: one["ts"]):
        spans[event["pid"]].append((threads[(event["pid"], event["tid"])], event))
    return spans


class Order:
    """What a rank does in a step."""

    def __init__(self):
        self.passes = []  # (direction, how many stages the micro-batch has been through on this rank, micro-batch)
        self.inside = []  # of each pass: (axis, kind, bytes) of the exchanges inside layers
        self.layers = []  # of each pass: those that were seen, if the timeline says
        self.sent = 0  # bytes of messages to other stages
        self.received = 0  # bytes of weights that the first stage keeps
        self.shares = []  # [kind, bytes] along the data axis
        self.seen = defaultdict(int)
        self.last = None

    def begin(self, direction, place, found):
        """Something is computed in a direction, in what holds a micro-batch; `found` says which, of how many passes before it."""
        if self.last != (direction, place):
            number, self.last = self.seen[(direction, place)], (direction, place)
            self.seen[(direction, place)] += 1
            self.passes.append((direction, *found(number)))
            self.inside.append([])
            self.layers.append(set())

    def add_share(self, kind, size):
        """Buckets that follow each other are one: what a simulation joins may travel in several."""
        if self.shares and self.shares[-1][0] == kind:
            self.shares[-1][1] += size
        else:
            self.shares.append([kind, size])

    def wrong_stage(self):
        """Of passes that are taken to be of one stage, two that compute other layers; or stages in another order."""
        stages = {}
        for (direction, stage, _), layers in zip(self.passes, self.layers):
            if direction == "forward" and stages.setdefault(stage, layers) != layers:
                return f"layers {sorted(layers)} and {sorted(stages[stage])} in forward passes of stage {stage}"
        firsts = [min(layers) for _, layers in sorted(stages.items()) if layers]
        return None if firsts == sorted(firsts) else f"stages begin with the layers {firsts}"

    def difference(self, other):
        """From a simulated one; `None` if it is the same."""
        if self.passes != other.passes:
            pairs = zip(self.passes, other.passes)
            at = next((at for at, (one, two) in enumerate(pairs) if one != two), min(len(self.passes), len(other.passes)))
            return f"pass {at}: {self.passes[at : at + 3]}, simulated {other.passes[at : at + 3]}"
        for one, two, what in zip(self.inside, other.inside, self.passes):
            if one != two:
                return f"exchanges of {what}: {one}, simulated {two}"
        if not near(self.sent, other.sent):
            return f"bytes sent to other stages: {self.sent}, simulated {other.sent}"
        same = [kind for kind, _ in self.shares] == [kind for kind, _ in other.shares]
        if not same or not all(near(a, b) for (_, a), (_, b) in zip(self.shares, other.shares)):
            return f"along the data axis: {self.shares}, simulated {other.shares}"
        return None


def layer_of(words):
    """The number of the layer in a name such as `forward h.3.attn`."""
    return next((int(part) for part in words[-1].split(".") if part.isdigit()), None)


def near(one, other):
    return abs(one - other) <= BYTES_PART * max(one, other)


def simulated_order(spans):
    """Of a role. The passes of a micro-batch go through the stages of a rank in order: there, and back."""
    order = Order()
    for thread, event in spans:
        words, size = event["name"].split(), event["args"]["bytes"]
        if event["cat"] == "compute":
            if words[0] != "update":
                micro_batch = int(words[-1])
                order.begin(words[0], micro_batch, lambda number, of=micro_batch: (number, of))
        elif thread.endswith("along pipeline sums") and not order.passes:
            # Weights that two stages read come before the first pass; their gradients leave after it.
            order.received += size
        elif "along pipeline" in thread:
            order.sent += size
        elif thread.endswith("along data"):
            order.add_share(words[0], size)
        else:
            order.inside[-1].append((thread.split()[-1], words[0], size))
    return order


def real_order(spans, place, chunks):
    """Of the rank at this place of the pipeline. Its micro-batches take turns in slots, each with a thread of the timeline."""
    order, computed = Order(), [one for one in spans if one[1]["cat"] == "compute"]
    passes = [one for one in computed if one[1]["name"].split()[0] in ("forward", "backward")]
    # What happens once per step may share a thread with a slot; the first micro-batch is in the first.
    first = next(event["ts"] for thread, event in passes if thread == "compute 0")
    slots = len({thread for thread, event in passes if event["ts"] >= first})
    for thread, event in spans:
        words, size = event["name"].split(), event["args"]["bytes"]
        if event["cat"] == "compute":
            if event["ts"] >= first and words[0] in ("forward", "backward"):
                slot = int(thread.split()[1])
                # Slots compute one micro-batch after the other, through all stages of the rank.
                order.begin(words[0], slot, lambda number, slot=slot: (number % chunks, slot + slots * (number // chunks)))
                order.layers[-1] |= {layer_of(words)} - {None}
        elif "along pipeline from" in thread:
            # Both ends record a message.
            sender = int(thread.split("from")[1].split()[0])
            order.sent += size if sender == place else 0
        elif len(words) > 1 and words[1].startswith(("bucket", "parameters")):
            order.add_share(words[0], size)
        elif ", lane" in thread:
            order.inside[-1].append((thread.split(",")[0].split()[-1], words[0], size))
    return order


def value_of(keys, name):
    return next((int(key.split("=")[1]) for key in keys if key.startswith(f"parallel.{name}=")), 1)


def compare_order(args, job, keys, cluster, folder):
    """What the first rank that differs does otherwise than simulated, or how much is equal."""
    real, simulated = folder / "real.json", folder / "simulated.json"
    steps = ["--threads", 1, "--quiet", "--no-out", "--set", "train.steps=3", "--trace-steps", "1..2"]
    run(args, "train", job, "--device", "cpu", "-n", args.workers, *steps, "--trace", real, *flags(keys))
    run(args, "simulate", job, "--cluster", cluster, "-n", args.workers, "--trace", simulated, *flags(keys))
    tensor, pipeline, chunks = (value_of(keys, name) for name in ("tensor", "pipeline", "chunks"))
    roles = {role: simulated_order(spans) for role, spans in spans_of(simulated).items()}
    roles[0].sent += sum(role.received for role in roles.values())
    passes = exchanges = 0
    for rank, spans in sorted(spans_of(real).items()):
        place = rank // tensor % pipeline
        order = real_order(spans, place, chunks)
        difference = order.wrong_stage() or order.difference(roles[place])
        if difference:
            return f"rank {rank}, {difference}"
        passes, exchanges = passes + len(order.passes), exchanges + sum(map(len, order.inside)) + len(order.shares)
    return f"equal: {passes} passes, {exchanges} exchanges"


def main():
    args = arguments()
    job = BENCH / "jobs" / f"{args.job}.toml"
    layouts = [(name, keys + args.set) for name, keys in layouts_of(args.workers, args.layers)]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        cluster = folder / "cluster.toml"
        sizes = SIZES if not args.order_only else "1K"
        measured = ["--op", COLLECTIVES, "--bytes", sizes, "--iterations", 50]
        run(args, "bench", "comm", "-n", args.workers, "--transport", "shm", *measured, "--write", cluster)
        if (os.cpu_count() or 1) > args.workers * args.threads:
            cluster.write_text(re.sub(r"(?m)^(overlaps_\w+) = false$", r"\1 = true", cluster.read_text()))
        rows = [{"layout": name} for name, _ in layouts]
        if not args.order_only:
            rows = compare_times(args, job, layouts, cluster, folder)
        for row, (_, keys) in zip(rows, layouts):
            row["order"] = compare_order(args, job, keys, cluster, folder)
    print_rows(args, rows)
    if args.report:
        Path(args.report).write_text(json.dumps(rows, indent=2))


def print_rows(args, rows):
    print(f"{args.job} on {args.workers} workers with --threads {args.threads}")
    print("| layout | simulated ms | measured ms | simulated / measured | calibrated / measured | order |")
    print("|---|---:|---:|---:|---:|---|")
    for row in rows:
        order = row["order"]
        if args.order_only:
            print(f"| {row['layout']} | - | - | - | - | {order} |")
            continue
        first, second = (row[key] / row["measured_ms"] for key in ("simulated_ms", "calibrated_ms"))
        print(f"| {row['layout']} | {row['simulated_ms']:.2f} | {row['measured_ms']:.2f} | {first:.2f} | {second:.2f} | {order} |")


if __name__ == "__main__":
    main()
