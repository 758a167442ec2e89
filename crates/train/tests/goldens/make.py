"""Makes the goldens: ten AdamW steps of each model in PyTorch, from numbers that any language can recreate.

Every starting weight and every batch is a function of a name and an index, in integer arithmetic up to the last line:

    value(name, index):
        h = FNV-1a, 64 bits, of the name's UTF-8 bytes (offset 0xCBF29CE484222325, prime 0x100000001B3)
        z = h + (index + 1) * 0x9E3779B97F4A7C15        modulo 2^64, as is all that follows
        z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9
        z ^= z >> 27;  z *= 0x94D049BB133111EB
        z ^= z >> 31
        u = (z >> 40) / 2^24                            in [0, 1)

`index` counts the elements of the tensor in row-major order, from 0.

Parameters are named as in the state_dict. With two or more dims: (2u - 1) * (1 / sqrt(fan_in)), fan_in the product of
every dim but the first, whatever the layout means by it. With one dim: 1 + 0.1 * (2u - 1) if the name ends in `.weight`
and contains `norm`, `bn` or `ln_`, or ends in `downsample.1.weight`; 0.1 * (2u - 1) otherwise. All of it is computed in
float64 and rounded once to float32. Batch norm's running mean starts at 0 and its variance at 1.

Batches: step s, from 0 to 9, takes its input from the name `x{s}` and its target from `y{s}`; real elements are 2u - 1,
classes and tokens floor(u * count). Shapes, batch first:

    mlp       x [8, 20]         y [8] of 5         20-16-16-5
    cnn       x [8, 1, 8, 8]    y [8] of 10
    resnet18  x [4, 3, 32, 32]  y [4] of 10
    gpt       x [4, 16] of 50   y [4, 16] of 50    2 layers, width 32, 2 heads, context 16
    lstm      x [4, 12, 3]      y [4, 1] real      2 layers, width 16

AdamW: lr 1e-3, betas 0.9 and 0.999, eps 1e-8, weight decay 0.01 on parameters of two or more dims and none on the rest.
The ResNet takes SGD instead: lr 2e-5, momentum 0.9, the same weight decay. With a batch of four under batch norm, Adam's
first steps keep little but the sign of a gradient, and float32 rounding grows from 1e-7 of the first loss to 1e-2 of the
tenth, in PyTorch itself.

The other optimizers train the mlp, in files of their own: `mlp_nesterov`, `mlp_rmsprop`, `mlp_adagrad` are PyTorch's, and
`mlp_lars`, `mlp_lamb` follow the algorithms of their papers, written down here from the papers. Their numbers stand under
OPTIMIZERS. Weight decay is 0.01 on parameters of two or more dims and none on the rest, and LARS and LAMB adapt the rate of
the former only.

The goldens are a float64 run, which leaves the whole of a difference to whoever is compared with it; the same run in
float32 is made only to print how far it strays. Files, one line each:

    loss <step> <value>                                       before that step's update
    param <name> <dims, by comma> <l2 of it after the ten steps> <l2 of its change>
    buffer <name> <dims> <l2> <l2 of its change>              batch norm's running statistics
    grad <name> <dims> <l2>                                   of the first step's loss, in resnet18_gradient.txt only
    at <index> <value>                                        elements of the tensor named last

One place needs more than a relative tolerance in float32: the gradient of GPT's key biases, the middle third of
`c_attn.bias`, is zero up to rounding, because a softmax ignores what is added to a whole row; Adam divides that noise
by its own size. The norms of `c_attn.bias` leave that third out.

The sampled indices are multiples of an odd stride, which does not keep to one column of a matrix as an even one may.
"""

import sys
from pathlib import Path

import numpy
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[3] / "bench/peers"))
import models  # noqa: E402

STEPS = 10
MASK = 2**64 - 1
# The ResNet has a hundred tensors; fewer samples of each keep its file as small as the others.
SAMPLES = {"resnet18": 12}
SAMPLES_DEFAULT = 32

MODELS = {
    "mlp": lambda: models.Mlp([20, 16, 16, 5]),
    "cnn": lambda: models.Cnn((1, 8, 8), 10),
    "resnet18": lambda: models.ResNet18((3, 32, 32), 10),
    "gpt": lambda: models.Gpt(layers=2, width=32, heads=2, context=16, vocab=50),
    "lstm": lambda: models.Lstm(features=3, width=16, layers=2),
}
# Shape, then the number of classes or tokens, or None for real elements.
BATCHES = {
    "mlp": (([8, 20], None), ([8], 5)),
    "cnn": (([8, 1, 8, 8], None), ([8], 10)),
    "resnet18": (([4, 3, 32, 32], None), ([4], 10)),
    "gpt": (([4, 16], 50), ([4, 16], 50)),
    "lstm": (([4, 12, 3], None), ([4, 1], None)),
}


class Lars(torch.optim.Optimizer):
    """You, Gitman, Ginsburg 2017, algorithm 1: a local rate for each layer, and the rate inside the momentum."""

    def __init__(self, groups, lr, momentum, trust):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for w in group["params"]:
                g, decay = w.grad, group["weight_decay"]
                local = group["trust"] * w.norm() / (g.norm() + decay * w.norm()) if w.ndim >= 2 else 1.0
                v = self.state[w].get("v", torch.zeros_like(w))
                v = group["momentum"] * v + group["lr"] * local * (g + decay * w)
                self.state[w]["v"] = v
                w.sub_(v)


class Lamb(torch.optim.Optimizer):
    """You et al. 2019, algorithm 2: Adam's direction plus the decay, as long as the weights are, layer by layer."""

    def __init__(self, groups, lr, betas, eps):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            first, second = group["betas"]
            for w in group["params"]:
                state = self.state[w]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = first * state.get("m", 0.0) + (1 - first) * w.grad
                v = state["v"] = second * state.get("v", 0.0) + (1 - second) * w.grad**2
                r = m / (1 - first**t) / ((v / (1 - second**t)).sqrt() + group["eps"])
                r = r + group["weight_decay"] * w
                ratio = w.norm() / r.norm() if w.ndim >= 2 else 1.0
                w.sub_(group["lr"] * ratio * r)


ADAMW = lambda groups: torch.optim.AdamW(  # noqa: E731
    groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, foreach=False, fused=False
)
OPTIMIZERS = {
    "resnet18": lambda groups: torch.optim.SGD(groups, lr=2e-5, momentum=0.9, foreach=False),
    "mlp_nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, foreach=False),
    "mlp_rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=2e-3, alpha=0.9, eps=1e-6, momentum=0.5, foreach=False),
    "mlp_adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.02, lr_decay=0.1, eps=1e-10, foreach=False),
    "mlp_lars": lambda groups: Lars(groups, lr=0.5, momentum=0.9, trust=0.02),
    "mlp_lamb": lambda groups: Lamb(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-6),
}
RUNS = list(MODELS) + [name for name in OPTIMIZERS if name not in MODELS]


def uniform(name, count):
    """u of every index below `count`, as float64."""
    fnv = 0xCBF29CE484222325
    for byte in name.encode():
        fnv = ((fnv ^ byte) * 0x100000001B3) & MASK
    z = numpy.uint64(fnv) + numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    z ^= z >> numpy.uint64(31)
    return (z >> numpy.uint64(40)).astype(numpy.float64) / 2**24


def starting_weight(name, shape):
    signed = 2 * uniform(name, int(numpy.prod(shape))) - 1
    if len(shape) >= 2:
        values = signed * (1 / numpy.sqrt(numpy.prod(shape[1:], dtype=numpy.float64)))
    elif name.endswith("downsample.1.weight") or (
        name.endswith(".weight") and any(part in name for part in ("norm", "bn", "ln_"))
    ):
        values = 1 + 0.1 * signed
    else:
        values = 0.1 * signed
    return torch.from_numpy(values.astype(numpy.float32).reshape(shape))


def batch_tensor(name, shape, classes, dtype):
    u = uniform(name, int(numpy.prod(shape)))
    if classes is None:
        return torch.from_numpy(2 * u - 1).reshape(shape).to(dtype)
    return torch.from_numpy(numpy.floor(u * classes).astype(numpy.int64)).reshape(shape)


def tensors_of(model):
    """Parameters and running statistics by name, in the order of the state_dict, as float64 copies."""
    parameters = dict(model.named_parameters())
    return {
        name: ("param" if name in parameters else "buffer", tensor.detach().double().clone())
        for name, tensor in model.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }


def train(kind, dtype):
    """The losses, the tensors before, the tensors after and the gradients of the first step."""
    family = kind.split("_")[0]
    model = MODELS[family]().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(starting_weight(name, tuple(parameter.shape)))
    before = tensors_of(model)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = OPTIMIZERS.get(kind, ADAMW)(groups)
    losses = []
    for step in range(STEPS):
        x, y = (batch_tensor(f"{letter}{step}", *spec, dtype) for letter, spec in zip("xy", BATCHES[family]))
        optimizer.zero_grad(set_to_none=True)
        loss = models.loss_of(model, x, y)
        loss.backward()
        if step == 0:
            gradients = {name: parameter.grad.double().clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, before, tensors_of(model), gradients


def digits(value):
    return f"{float(value):.16e}"


def norm(name, tensor):
    if name.endswith("c_attn.bias"):
        queries, _, values = tensor.chunk(3)
        tensor = torch.cat([queries, values])
    return digits(tensor.norm())


def samples(kind, tensor):
    flat = tensor.flatten()
    count = SAMPLES.get(kind, SAMPLES_DEFAULT)
    stride = max(1, len(flat) // count) | 1
    return [f"at {index} {digits(flat[index])}" for index in range(0, len(flat), stride)[:count]]


def write(name, lines):
    path = HERE / f"{name}.txt"
    path.write_text("\n".join(lines) + "\n")
    print(f"  {path.name}: {path.stat().st_size} bytes")


def write_run(kind, losses, before, after):
    lines = [f"loss {step} {digits(loss)}" for step, loss in enumerate(losses)]
    for name, (role, tensor) in after.items():
        change = tensor - before[name][1]
        dims = ",".join(map(str, tensor.shape))
        lines.append(f"{role} {name} {dims} {norm(name, tensor)} {norm(name, change)}")
        lines += samples(kind, tensor)
    write(kind, lines)


def write_gradients(kind, gradients):
    lines = []
    for name, tensor in gradients.items():
        lines.append(f"grad {name} {','.join(map(str, tensor.shape))} {norm(name, tensor)}")
        lines += samples(kind, tensor)
    write(f"{kind}_gradient", lines)


def compare(kind, single, double):
    """Prints how far float32 strays, as l2 of the error over l2 of the exact tensor; the changes are the strictest."""

    def worst(errors):
        return ", ".join("{:.1e} {}".format(*pair) for pair in sorted(errors)[:-4:-1])

    values, changes, gradients = [], [], []
    for name, (_, exact) in double[2].items():
        error = (single[2][name][1] - exact).norm()
        values.append((float(error / exact.norm()), name))
        changes.append((float(error / (exact - double[1][name][1]).norm()), name))
    for name, exact in double[3].items():
        gradients.append((float((single[3][name] - exact).norm() / exact.norm()), name))
    print(f"{kind}: float32 against float64")
    print("  losses:", " ".join(f"{abs(a - b) / abs(b):.1e}" for a, b in zip(single[0], double[0])))
    print("  first gradient:", worst(gradients))
    print("  values:", worst(values))
    print("  changes:", worst(changes))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for kind in sys.argv[1:] or RUNS:
        double = train(kind, torch.float64)
        compare(kind, train(kind, torch.float32), double)
        write_run(kind, *double[:3])
        if kind == "resnet18":
            write_gradients(kind, double[3])


if __name__ == "__main__":
    main()
