"""Writes torch.txt: results and gradients of some ops as PyTorch computes them, in f64. `torch.rs` has the same cases.

Usage: python goldens.py > torch.txt
"""

import torch
import torch.nn.functional as F


def number(at, salt):
    return ((at * 7 + salt * 5) % 23 - 11) / 8


def tensor(shape, salt):
    count = torch.Size(shape).numel()
    values = [number(at, salt) for at in range(count)]
    return torch.tensor(values, dtype=torch.float64).reshape(shape).requires_grad_()


def show(name, values):
    print(name, " ".join(f"{value:.9g}" for value in values.detach().flatten().tolist()))


def case(name, shapes, build):
    inputs = [tensor(shape, salt) for salt, shape in enumerate(shapes)]
    out = build(*inputs)
    weights = torch.tensor([number(at, 9) for at in range(out.numel())], dtype=torch.float64).reshape(out.shape)
    (out * weights).sum().backward()
    print("case", name)
    show("out", out)
    for at, value in enumerate(inputs):
        show(f"d{at}", value.grad)


WINDOWS = [((2, 2), (2, 2), (0, 0)), ((3, 3), (2, 2), (1, 1)), ((2, 3), (3, 4), (1, 1)), ((3, 2), (4, 5), (0, 1))]
for at, (kernel, stride, padding) in enumerate(WINDOWS):
    for ceil in (False, True):
        tag = f"{at}{' ceil' if ceil else ''}"
        case(f"max_pool {tag}", [(2, 1, 5, 6)], lambda x: F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil))
        for count in (False, True):
            pool = lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil_mode=ceil, count_include_pad=count)
            case(f"avg_pool {tag}{' count' if count else ''}", [(2, 1, 5, 6)], pool)


def conv(x, weight, pads, **rest):
    top, bottom, left, right = pads
    return F.conv2d(F.pad(x, (left, right, top, bottom)), weight, **rest)


case("conv uneven", [(1, 2, 5, 4), (3, 2, 3, 3)], lambda x, w: conv(x, w, (1, 0, 0, 2)))
case("conv uneven strided", [(1, 2, 6, 5), (2, 1, 3, 2)], lambda x, w: conv(x, w, (0, 2, 1, 0), stride=2, groups=2))


def conv_transpose(x, weight, pads):
    top, bottom, left, right = pads
    whole = F.conv_transpose2d(x, weight, stride=2, output_padding=1)
    return whole[:, :, top : whole.shape[2] - bottom, left : whole.shape[3] - right]


case("conv_transpose uneven", [(1, 2, 3, 3), (2, 2, 3, 3)], lambda x, w: conv_transpose(x, w, (1, 0, 2, 1)))

case("matmul shared right", [(2, 3, 4), (4, 2)], torch.matmul)
case("matmul shared left", [(3, 4), (2, 4, 2)], torch.matmul)
case("matmul both stretch", [(2, 1, 3, 2), (3, 2, 2)], torch.matmul)


def attention(q, k, v, heads, diagonal):
    batch, queries, width = q.shape
    split = lambda x: x.reshape(batch, -1, heads, width // heads).transpose(1, 2)
    mask = None
    if diagonal is not None:
        mask = torch.ones(queries, k.shape[1], dtype=torch.bool).tril(diagonal)
    out = F.scaled_dot_product_attention(split(q), split(k), split(v), attn_mask=mask)
    return out.transpose(1, 2).reshape(batch, queries, width)


SHORT = [(1, 2, 4), (1, 4, 4), (1, 4, 4)]
LONG = [(1, 4, 4), (1, 2, 4), (1, 2, 4)]
case("attention top left, fewer queries", SHORT, lambda q, k, v: attention(q, k, v, 2, 0))
case("attention bottom right, fewer queries", SHORT, lambda q, k, v: attention(q, k, v, 2, 2))
case("attention top left, more queries", LONG, lambda q, k, v: attention(q, k, v, 2, 0))
case("attention bottom right, more queries", LONG, lambda q, k, v: attention(q, k, v, 2, -2))
# PyTorch's own causal flag.
is_causal = lambda q, k, v: F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
case("attention as is_causal", SHORT, is_causal)

# To planes larger than those that come in, too.
for name, shape in [("down", (1, 1, 9, 10)), ("up", (1, 2, 2, 3))]:
    case(f"adaptive_avg_pool {name}", [shape], lambda x: F.adaptive_avg_pool2d(x, (7, 7)))
