"""The PyTorch models that kolo is measured and checked against.

Parameter names and layouts are those of the checkpoints found in the wild (torchvision for the ResNet, Hugging Face for
the GPT), because kolo reads and writes the same ones. The timing peer and the goldens both build from here, so a model
that is timed is the model that was checked.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Cnn(nn.Module):
    """Two 3x3 convolutions, one 2x2 max-pool, one hidden linear layer."""

    def __init__(self, image=(1, 8, 8), classes=10):
        super().__init__()
        channels, height, width = image
        self.convs = nn.ModuleList([nn.Conv2d(channels, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)])
        self.fc = nn.Linear(32 * (height // 2) * (width // 2), 64)
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        for conv in self.convs:
            x = F.relu(conv(x))
        x = F.max_pool2d(x, 2).flatten(1)
        return self.head(F.relu(self.fc(x)))


class BasicBlock(nn.Module):
    def __init__(self, channels_in, channels_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.downsample = None
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, x):
        skip = x if self.downsample is None else self.downsample(x)
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.bn2(self.conv2(x))
        return F.relu(x.add_(skip), inplace=True)


class ResNet18(nn.Module):
    """torchvision's resnet18; images under 64 pixels get the CIFAR stem (3x3, stride 1, no pooling)."""

    def __init__(self, image=(3, 32, 32), classes=10):
        super().__init__()
        self.small = image[1] < 64
        kernel, stride, padding = (3, 1, 1) if self.small else (7, 2, 3)
        self.conv1 = nn.Conv2d(image[0], 64, kernel, stride, padding, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        channels = 64
        for number, width in enumerate((64, 128, 256, 512), start=1):
            blocks = [BasicBlock(channels, width, 1 if number == 1 else 2), BasicBlock(width, width, 1)]
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
            channels = width
        self.fc = nn.Linear(512, classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        if not self.small:
            x = F.max_pool2d(x, 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


class Conv1D(nn.Module):
    """A linear layer whose weight is stored [in, out], as in Hugging Face's GPT-2."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=0.02))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(width, 3 * width)
        self.c_proj = Conv1D(width, width)

    def forward(self, x):
        batch, context, width = x.shape
        split = (batch, context, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, context, width))


class FeedForward(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = Conv1D(width, 4 * width)
        self.c_proj = Conv1D(4 * width, width)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-5)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=1e-5)
        self.mlp = FeedForward(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """GPT-2. The output head is tied to `wte.weight`, so it adds no name to the checkpoint, unless it is to have its own."""

    def __init__(self, layers, width, heads, context, vocab, tied=True):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, eps=1e-5)
        self.lm_head = None if tied else nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight if self.lm_head is None else self.lm_head.weight)


class Lstm(nn.Module):
    def __init__(self, features, width, layers, outputs=1):
        super().__init__()
        self.lstm = nn.LSTM(features, width, layers, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        hidden, _ = self.lstm(x)
        return self.head(hidden[:, -1])


def loss_of(model, x, y):
    """Mean squared error for the LSTM, mean cross entropy over every sample or token for the rest."""
    out = model(x)
    if isinstance(model, Lstm):
        return F.mse_loss(out, y)
    return F.cross_entropy(out.flatten(0, -2), y.flatten())
