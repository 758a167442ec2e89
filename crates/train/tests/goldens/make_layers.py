"""Makes `layers.txt`: modules of torch.nn in float64, with the names of their parameters, their gradients and how they start.

The elements of input `x` of a case are 2u - 1, with u as `make.py` defines it of the name `{case}.x`, rounded to float32; those of
a parameter the same of `{case}.{parameter}`; ids are floor(u * count). The gradients are those of the sum of the output's
elements, each times the element of the same number of `{case}.w`.

    case <name>
    y <elements of the output, row-major>
    grad <parameter, or x> <dims, by comma> <elements>
    start <parameter> <dims of a larger module> <root mean square> <largest magnitude>
"""

from pathlib import Path

import numpy
import torch

from make import uniform

HERE = Path(__file__).resolve().parent


def numbers(name, shape):
    signed = 2 * uniform(name, int(numpy.prod(shape))) - 1
    return torch.from_numpy(signed.astype(numpy.float32).astype(numpy.float64)).reshape(shape)


def ids(name, shape, count):
    drawn = numpy.floor(uniform(name, int(numpy.prod(shape))) * count)
    return torch.from_numpy(drawn.astype(numpy.int64)).reshape(shape)


NN = torch.nn
# A module, its input, and a larger module whose start is measured.
CASES = {
    "gru": (NN.GRU(3, 4, num_layers=2, batch_first=True), [2, 5, 3], NN.GRU(48, 64, num_layers=2)),
    "lstm": (NN.LSTM(3, 4, num_layers=2, batch_first=True), [2, 5, 3], NN.LSTM(48, 64, num_layers=2)),
    "embedding": (NN.Embedding(7, 3), [2, 5], NN.Embedding(500, 40)),
    "conv_transpose2d": (
        NN.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        [2, 4, 3, 5],
        NN.ConvTranspose2d(48, 32, 3),
    ),
}


def elements(tensor):
    return " ".join(f"{float(value):.9e}" for value in tensor.detach().flatten())


def dims(tensor):
    return ",".join(str(size) for size in tensor.shape)


def main():
    torch.manual_seed(1)
    lines = []
    for name, (module, shape, larger) in CASES.items():
        module = module.double()
        is_table = isinstance(module, NN.Embedding)
        x = ids(f"{name}.x", shape, module.num_embeddings) if is_table else numbers(f"{name}.x", shape).requires_grad_()
        with torch.no_grad():
            for key, value in module.named_parameters():
                value.copy_(numbers(f"{name}.{key}", list(value.shape)))
        y = module(x)
        y = y[0] if isinstance(y, tuple) else y
        (y * numbers(f"{name}.w", list(y.shape))).sum().backward()
        lines += [f"case {name}", f"y {elements(y)}"]
        if not is_table:
            lines.append(f"grad x {dims(x)} {elements(x.grad)}")
        lines += [f"grad {key} {dims(value)} {elements(value.grad)}" for key, value in module.named_parameters()]
        for key, value in larger.named_parameters():
            size, largest = value.square().mean().sqrt().item(), value.abs().max().item()
            lines.append(f"start {key} {dims(value)} {size:.6e} {largest:.6e}")
    (HERE / "layers.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
