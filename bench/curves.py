"""Compares kolo's loss curves with PyTorch's: a GPT, ResNet-18 and an LSTM, from the same weights, over the same batches.

PyTorch makes the first weights and the samples from a fixed seed. kolo starts from that file (`model.from`) and reads the samples in their order
(a stream with `shuffle_buffer = 1`), with the same optimizer and rate. So curves agree to rounding in the first step, and drift apart as
rounding grows. How far is noise: three more runs of PyTorch start from weights that differ by a relative 1e-6.

A curve is 200 losses, smoothed to means of 20. The distance of two curves is the largest difference of such means, relative to the second
curve's. A row is within noise if its distance from PyTorch's run in the same precision, and from kolo's own on the CPU in f32, is at most three times the
noise, or 1 %. The noise of a row is the largest distance of a perturbed run of PyTorch in its precision from PyTorch's run in the
precision that it is compared with. A loss of the first step in f32 that is off by more than 1e-5 is a failure whatever the noise. One row is a control: PyTorch at
another rate, which must be told apart.

    python bench/curves.py --report curves.svg
    python bench/curves.py --models gpt,lstm --precisions f32,bf16 --kolo target/release/kolo

Without a GPU, kolo and PyTorch are compared on the CPU, in f32 or the precisions asked for. Exit code 1: some row is not within noise.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy
import torch

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH / "peers"))
import models  # noqa: E402

STEPS, WINDOW, SHOWN = 200, 20, (1, 10, 50, 100, 200)
PERTURBED, PERTURBATION = 3, 1e-6
NOISE_FACTOR, FLOOR, FIRST_STEP = 3, 0.01, 1e-5
CONTROL = 1.25


@dataclass
class Case:
    """A model on both sides. `samples` makes the arrays x and y of all steps; `write` puts them into a file that kolo streams."""

    model: str
    data: str
    optimizer: str
    batch: int
    samples: Callable
    write: Callable
    torch_model: Callable
    torch_optimizer: Callable
    weight_decay: float


def markov_tokens(random, count, context=64, vocab=256, successors=8):
    """Each token is followed by one of eight, with probabilities of its own: about 1.7 of 5.5 nats cannot be learnt."""
    followers = numpy.stack([random.permutation(vocab)[:successors] for _ in range(vocab)])
    chances = numpy.cumsum(random.dirichlet(numpy.full(successors, 1.0), vocab), axis=1)
    tokens = numpy.zeros((count, context + 1), dtype=numpy.int64)
    tokens[:, 0] = random.integers(vocab, size=count)
    for at in range(context):
        now = tokens[:, at]
        drawn = (random.random(count)[:, None] > chances[now]).sum(axis=1).clip(max=successors - 1)
        tokens[:, at + 1] = followers[now, drawn]
    return tokens[:, :-1], tokens[:, 1:]


def patterned_images(random, count, size=32, classes=10):
    """A smooth pattern per class, shifted and under noise of its own size. A tenth of the labels is drawn anew, so the loss does not go to 0."""
    grid = numpy.arange(size) * 2 * numpy.pi / size
    patterns = numpy.zeros((classes, 3, size, size))
    for _ in range(6):
        across, down = random.integers(1, 6, size=(2, classes, 3, 1, 1))
        phase = random.uniform(0, 2 * numpy.pi, (classes, 3, 1, 1))
        patterns += numpy.sin(across * grid[None, None, None, :] + down * grid[None, None, :, None] + phase) / numpy.sqrt(3)
    labels = random.integers(classes, size=count)
    shifts = random.integers(size, size=(count, 2))
    images = numpy.stack([numpy.roll(patterns[label], shift, axis=(1, 2)) for label, shift in zip(labels, shifts)])
    images += random.normal(0, 1, images.shape)
    redrawn = random.random(count) < 0.1
    labels[redrawn] = random.integers(classes, size=redrawn.sum())
    return images.astype(numpy.float32), labels


def noisy_waves(random, count, context=32):
    """Two sines of random frequency and phase under noise, of which the next value is to be told."""
    frequency, phase = random.uniform(0.1, 0.9, (count, 2, 1)), random.uniform(0, 2 * numpy.pi, (count, 2, 1))
    waves = numpy.sin(frequency * numpy.arange(context + 1) + phase).sum(axis=1) + random.normal(0, 0.2, (count, context + 1))
    waves = waves.astype(numpy.float32)
    return waves[:, :-1, None], waves[:, -1:]


def write_lines(path, x, y):
    """JSON Lines of tokens; the target is the token after each."""
    with open(path, "w") as file:
        for row, last in zip(x.tolist(), y[:, -1].tolist()):
            file.write(json.dumps({"x": [*row, last]}) + "\n")


def write_archive(path, x, y):
    """A tar archive with the members `x.npy` and `y.npy`, or `cls` for a class, of each sample."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:

        def add(name, contents):
            member = tarfile.TarInfo(name)
            member.size = len(contents)
            archive.addfile(member, io.BytesIO(contents))

        def array(values):
            file = io.BytesIO()
            numpy.save(file, values)
            return file.getvalue()

        for at, (one, target) in enumerate(zip(x, y)):
            add(f"{at:06}.x.npy", array(one))
            is_class = target.dtype.kind == "i"
            add(f"{at:06}.cls" if is_class else f"{at:06}.y.npy", str(target).encode() if is_class else array(target))


CASES = {
    "gpt": Case(
        model='kind = "gpt"\nlayers = 4\nwidth = 128\nheads = 4\ncontext = 64\nvocab = 256',
        data='source = "samples.jsonl"\nvocab = 256',
        optimizer='kind = "adamw", lr = 1e-3, weight_decay = 0.1',
        batch=16,
        samples=markov_tokens,
        write=write_lines,
        torch_model=lambda: models.Gpt(4, 128, 4, 64, 256),
        torch_optimizer=lambda groups, factor: torch.optim.AdamW(groups, lr=1e-3 * factor),
        weight_decay=0.1,
    ),
    "resnet18": Case(
        model='kind = "resnet18"\nclasses = 10\nimage = [3, 32, 32]',
        data='source = "samples.tar"\ninputs = ["x.npy"]\ntarget = "cls"\nclasses = 10',
        optimizer='kind = "sgd", lr = 0.001, momentum = 0.9, weight_decay = 5e-4',
        batch=16,
        samples=patterned_images,
        write=write_archive,
        torch_model=lambda: models.ResNet18((3, 32, 32), 10),
        torch_optimizer=lambda groups, factor: torch.optim.SGD(groups, lr=1e-3 * factor, momentum=0.9),
        weight_decay=5e-4,
    ),
    "lstm": Case(
        model='kind = "lstm"\nlayers = 2\nwidth = 64\ncontext = 32\nfeatures = 1\noutputs = 1',
        data='source = "samples.tar"\ninputs = ["x.npy"]\ntarget = "y.npy"\ntask = "regression"',
        optimizer='kind = "adamw", lr = 5e-3, weight_decay = 0.01',
        batch=32,
        samples=noisy_waves,
        write=write_archive,
        torch_model=lambda: models.Lstm(1, 64, 2),
        torch_optimizer=lambda groups, factor: torch.optim.AdamW(groups, lr=5e-3 * factor),
        weight_decay=0.01,
    ),
}


def write_safetensors(path, tensors):
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().contiguous().numpy().astype("<f4").tobytes())


class Runs:
    """The samples and first weights of one case, in a folder, and the curves of who trains on them."""

    def __init__(self, options, name, folder):
        self.options, self.case, self.folder = options, CASES[name], Path(folder)
        self.x, self.y = self.case.samples(numpy.random.default_rng(options.seed), STEPS * self.case.batch)
        torch.manual_seed(options.seed)
        state = self.case.torch_model().state_dict()
        self.first = {key: tensor for key, tensor in state.items() if not key.endswith("num_batches_tracked")}
        write_safetensors(self.folder / "first.safetensors", self.first)
        source = "samples.jsonl" if "jsonl" in self.case.data else "samples.tar"
        self.case.write(self.folder / source, self.x, self.y)

    def kolo(self, device, precision):
        out = self.folder / f"{device}-{precision}"
        job = self.folder / f"{device}-{precision}.toml"
        case = self.case
        job.write_text(f"""[model]
{case.model}
from = "first.safetensors"
[data]
{case.data}
stream = true
shuffle_buffer = 1
batch = {case.batch}
grains = 1
holdout = 0
[train]
steps = {STEPS}
log_every = 1
precision = "{precision}"
optimizer = {{ {case.optimizer} }}
schedule = {{ kind = "constant" }}
""")
        command = [self.options.kolo, "train", job.name, "--device", device, "--threads", str(self.options.threads),
                   "--quiet", "--out", str(out)]  # fmt: skip
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=self.options.limit)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses = [row["step/loss"] for row in rows if "step/loss" in row]
        if len(losses) != STEPS:
            raise RuntimeError(f"{len(losses)} of {STEPS} steps have a loss in metrics.jsonl")
        return losses

    def torch(self, device, precision, perturbed=0, rate=1.0):
        """`perturbed` numbers another start, whose weights differ by a relative 1e-6."""
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        model = self.case.torch_model()
        model.load_state_dict(self.first, strict=False)
        if perturbed:
            random = torch.Generator().manual_seed(perturbed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + PERTURBATION * torch.randn(parameter.shape, generator=random))
        model = model.to(device)
        groups = [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": self.case.weight_decay},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = self.case.torch_optimizer(groups, rate)
        x, y = (torch.from_numpy(array).to(device).split(self.case.batch) for array in (self.x, self.y))
        # oneDNN refuses an LSTM in bf16 on processors that cannot multiply bf16.
        is_refused = device == "cpu" and precision == "bf16" and isinstance(model, models.Lstm)
        losses = []
        with torch.backends.mkldnn.flags(enabled=False) if is_refused else nullcontext():
            for one, target in zip(x, y):
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                    loss = models.loss_of(model, one, target)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
        return torch.stack(losses).double().tolist()


def smooth(curve):
    return numpy.asarray(curve).reshape(-1, WINDOW).mean(axis=1)


def distance(curve, other):
    """NaN if either has one, which no bound allows."""
    return float(numpy.max(numpy.abs(smooth(curve) - smooth(other)) / smooth(other)))


def measure(runs, options, log):
    """Every curve by (who, device, precision); the perturbed ones of PyTorch are lists. Who fails has a message instead."""
    device = options.device
    curves = {}

    def run(key, make):
        began = time.perf_counter()
        try:
            curves[key] = make()
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            curves[key] = str(error)
        log(f"{' '.join(key)}: {time.perf_counter() - began:.1f} s")

    for precision in options.precisions:
        run(("PyTorch", device, precision), lambda: runs.torch(device, precision))
        run(("perturbed", device, precision), lambda: [runs.torch(device, precision, n) for n in range(1, PERTURBED + 1)])
    run(("control", device, "f32"), lambda: runs.torch(device, "f32", rate=CONTROL))
    for place in dict.fromkeys(("cpu", device)):
        for precision in options.precisions if place == device else ["f32"]:
            run(("kolo", place, precision), lambda: runs.kolo(place, precision))
    return curves


def judge(curves, key, device):
    """The distances of one curve, their noise, and whether it is within it."""
    precision = key[2]
    peer, perturbed = curves["PyTorch", device, precision], curves["perturbed", device, precision]
    row = {"torch": distance(curves[key], peer), "noise": max(distance(one, peer) for one in perturbed)}
    row["first_step"] = abs(curves[key][0] / peer[0] - 1)
    is_within = row["torch"] <= max(NOISE_FACTOR * row["noise"], FLOOR)
    if key[0] == "control":
        return {**row, "ok": not is_within}
    if precision == "f32":
        is_within &= row["first_step"] <= FIRST_STEP
    if key != ("kolo", "cpu", "f32"):
        row["kolo"] = distance(curves[key], curves["kolo", "cpu", "f32"])
        row["kolo_noise"] = max(distance(one, curves["PyTorch", device, "f32"]) for one in perturbed)
        is_within &= row["kolo"] <= max(NOISE_FACTOR * row["kolo_noise"], FLOOR)
    return {**row, "ok": is_within}


def percent(value):
    return f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"


def cells_of(key, row):
    """What follows the losses in a line of the table."""
    if row is None:
        return [""] * 5
    if "error" in row:
        return [*[""] * 4, f"**failed**: {row['error']}"]
    own = [percent(row["kolo"]), percent(row["kolo_noise"])] if "kolo" in row else ["", ""]
    good, bad = ("told apart", "**not told apart**") if key[0] == "control" else ("ok", "**not ok**")
    return [percent(row["torch"]), percent(row["noise"]), *own, good if row["ok"] else bad]


def table(name, curves, device):
    """Prints the rows of one model. Returns what was judged, by row."""
    heads = [f"step {step}" for step in SHOWN]
    print(f"\n| {name} | {' | '.join(heads)} | from PyTorch | noise | from kolo cpu f32 | noise | |")
    print("|---|" + "---:|" * (len(heads) + 4) + "---|")
    judged = {}
    for key, curve in curves.items():
        if key[0] == "perturbed":
            continue
        label = f"PyTorch {key[1]} f32, rate × {CONTROL}" if key[0] == "control" else " ".join(key)
        losses = [""] * len(SHOWN) if isinstance(curve, str) else [f"{curve[step - 1]:.4f}" for step in SHOWN]
        read = [key, *((who, device, precision) for who in ("PyTorch", "perturbed") for precision in (key[2], "f32")), ("kolo", "cpu", "f32")]
        failed = [f"{' '.join(one)}: {curves[one]}".splitlines()[0] for one in dict.fromkeys(read) if isinstance(curves[one], str)]
        if key[0] != "PyTorch" or isinstance(curve, str):
            judged[label] = {"ok": False, "error": "; ".join(failed)} if failed else judge(curves, key, device)
        print(f"| {label} | {' | '.join([*losses, *cells_of(key, judged.get(label))])} |", flush=True)
    return judged


COLOURS = ["#8a94a6", "#b9c0cb", "#d5dae2", "#1d2430", "#2f6fde", "#12a37a", "#d9822b"]


def draw(everything):
    """The smoothed curves, a panel per model."""
    width, height, left, top = 330, 240, 56, 34
    parts, most = [], 0
    for number, (name, (curves, _)) in enumerate(everything.items()):
        whole = {key: curve for key, curve in curves.items() if key[0] in ("PyTorch", "kolo") and not isinstance(curve, str)}
        lines = {key: smooth(curve) for key, curve in whole.items()}
        high = 1.05 * max(line.max() for line in lines.values())
        x0 = left + number * (width + left)
        parts.append(f'<text x="{x0}" y="{top - 12}" font-weight="600">{name}: loss, means of {WINDOW} steps</text>')
        parts.append(f'<rect x="{x0}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#b9c0cb"/>')
        for part in (0.0, 0.5, 1.0):
            y = top + height * (1 - part)
            parts.append(f'<text x="{x0 - 6}" y="{y + 4}" text-anchor="end">{part * high:.2f}</text>')
            parts.append(f'<text x="{x0 + part * width}" y="{top + height + 16}" text-anchor="middle">{int(part * STEPS)}</text>')
        for at, (key, line) in enumerate(lines.items()):
            steps = (numpy.arange(len(line)) + 0.5) / len(line)
            points = " ".join(f"{x0 + width * x:.1f},{top + height * (1 - y / high):.1f}" for x, y in zip(steps, line))
            style = f'stroke="{COLOURS[at % len(COLOURS)]}" stroke-width="{2 if key[0] == "kolo" else 5}"'
            parts.append(f'<polyline points="{points}" fill="none" {style}/>')
            y = top + height + 36 + 16 * at
            parts.append(f'<line x1="{x0}" x2="{x0 + 24}" y1="{y - 4}" y2="{y - 4}" {style}/>')
            parts.append(f'<text x="{x0 + 32}" y="{y}">{" ".join(key)}</text>')
            most = max(most, y + 14)
    size = f'width="{left + len(everything) * (width + left)}" height="{most}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="12" fill="#1d2430">'
    return "\n".join([head, f'<rect {size} fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def as_json(everything, options):
    settings = {"steps": STEPS, "window": WINDOW, "seed": options.seed, "torch": torch.__version__, "device": options.device,
                "perturbation": PERTURBATION, "noise_factor": NOISE_FACTOR, "floor": FLOOR}  # fmt: skip
    named = {name: {"curves": {" ".join(key): curve for key, curve in curves.items()}, "rows": rows}
             for name, (curves, rows) in everything.items()}  # fmt: skip
    return json.dumps({"settings": settings, "models": named}, indent=1) + "\n"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is one")
    parser.add_argument("--precisions", help="comma-separated; default: f32,tf32,bf16 on a GPU, f32 on a CPU")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each contestant on the CPU")
    parser.add_argument("--limit", type=int, default=1800, help="seconds for one run of kolo")
    parser.add_argument("--seed", type=int, default=1, help="of samples and first weights")
    parser.add_argument("--kolo", default=str(BENCH.parent / "target/release/kolo"))
    parser.add_argument("--report", help="write all curves to this file: a chart if it ends in .svg, JSON otherwise")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    options.models = options.models.split(",")
    options.precisions = (options.precisions or ("f32,tf32,bf16" if options.device == "cuda" else "f32")).split(",")
    options.kolo = str(Path(options.kolo).resolve())
    known = {"--models": (options.models, list(CASES)), "--precisions": (options.precisions, ["f32", "tf32", "bf16"])}
    for flag, (given, possible) in known.items():
        if set(given) - set(possible):
            parser.error(f"{flag} takes {', '.join(possible)}")
    if "f32" not in options.precisions:
        options.precisions.insert(0, "f32")
    if options.device == "cpu" and "tf32" in options.precisions:
        parser.error("tf32 needs a GPU")
    return options


def main():
    options = arguments()
    torch.set_num_threads(options.threads)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name() if options.device == 'cuda' else f'the CPU, threads: {options.threads}'}")
    if options.device == "cpu":
        print("GPU rows: skipped: no CUDA device" if not torch.cuda.is_available() else "GPU rows: skipped: --device cpu")
    everything = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            log = lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True)  # noqa: E731
            curves = measure(Runs(options, name, folder), options, log)
        everything[name] = (curves, table(name, curves, options.device))
    if options.report:
        Path(options.report).write_text(draw(everything) if options.report.endswith(".svg") else as_json(everything, options))
    bad = [f"{name}: {row}" for name, (_, rows) in everything.items() for row, judged in rows.items() if not judged["ok"]]
    print("\nall rows are as wanted" if not bad else "\nnot as wanted: " + "; ".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
