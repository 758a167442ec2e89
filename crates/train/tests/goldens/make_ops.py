"""Makes `ops.txt`: single layers in PyTorch, in float64, with their gradients.

Input number i of a case is named `{case}.{i}`; its elements are 2u - 1, with u as `make.py` defines it, rounded to float32.
The gradients are those of the sum of the output's elements, each times the element of the same number of `{case}.w`.

    case <name>
    y <elements of the output, row-major>
    grad <i> <elements of the gradient of input i>
"""

from pathlib import Path

import numpy
import torch
import torch.nn.functional as F

from make import uniform

HERE = Path(__file__).resolve().parent


def numbers(name, shape):
    signed = 2 * uniform(name, int(numpy.prod(shape))) - 1
    return torch.from_numpy(signed.astype(numpy.float32).astype(numpy.float64)).reshape(shape)


def recurrent(layer):
    def run(x, *weights):
        names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
        return torch.func.functional_call(layer, dict(zip(names, weights)), (x,))[0]

    return run


def rotary(x):
    """Su et al. 2021, equation 34, with the pairs half a head apart: a rotation matrix for every position and pair."""
    *_, length, dim = x.shape
    half = dim // 2
    rows = []
    for position in range(length):
        matrix = torch.zeros(dim, dim, dtype=x.dtype)
        for pair in range(half):
            angle = torch.tensor(position * 100.0 ** (-2 * pair / dim), dtype=x.dtype)
            matrix[pair, pair] = matrix[pair + half, pair + half] = angle.cos()
            matrix[pair, pair + half] = -angle.sin()
            matrix[pair + half, pair] = angle.sin()
        rows.append(x[..., position, :] @ matrix.T)
    return torch.stack(rows, dim=-2)


def weights(gates, inputs, width):
    return [[gates * width, inputs], [gates * width, width], [gates * width], [gates * width]]


CASES = {
    "gru": ([[2, 5, 3], *weights(3, 3, 4)], recurrent(torch.nn.GRU(3, 4, batch_first=True).double())),
    "rnn_tanh": ([[2, 5, 3], *weights(1, 3, 4)], recurrent(torch.nn.RNN(3, 4, batch_first=True).double())),
    "rnn_relu": (
        [[2, 5, 3], *weights(1, 3, 4)],
        recurrent(torch.nn.RNN(3, 4, nonlinearity="relu", batch_first=True).double()),
    ),
    "huber": ([[4, 5], [4, 5]], lambda x, t: F.huber_loss(2 * x, 2 * t, delta=0.7)),
    "group_norm": ([[2, 6, 3, 2], [6], [6]], lambda x, g, b: F.group_norm(x, 3, g, b, eps=1e-3)),
    "rotary": ([[2, 2, 5, 6]], rotary),
    "conv_transpose2d": (
        [[2, 4, 3, 4], [4, 3, 3, 2], [6]],
        lambda x, w, b: F.conv_transpose2d(
            x, w, b, stride=(2, 1), padding=(1, 0), output_padding=(1, 0), groups=2, dilation=(1, 2)
        ),
    ),
}


def line(word, tensor):
    return " ".join([word] + [f"{float(value):.9e}" for value in tensor.detach().flatten()])


def main():
    lines = []
    for name, (shapes, run) in CASES.items():
        inputs = [numbers(f"{name}.{at}", shape).requires_grad_() for at, shape in enumerate(shapes)]
        y = run(*inputs)
        (y * numbers(f"{name}.w", list(y.shape))).sum().backward()
        lines += [f"case {name}", line("y", y)]
        lines += [line(f"grad {at}", x.grad) for at, x in enumerate(inputs)]
    (HERE / "ops.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
