"""Models as users bring them: written without a thought of this package."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvNextBlock(nn.Module):
    """Depthwise 7x7, layer norm over channels-last, two linear layers, a learnt scale per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(0.5 * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        return shortcut + (self.gamma * x).permute(0, 3, 1, 2)


class ConvNextLike(nn.Module):
    def __init__(self, channels: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, stride=4)
        self.blocks = nn.Sequential(ConvNextBlock(channels), ConvNextBlock(channels))
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean([-2, -1])))


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(batch, tokens, dim))


class TorchAttention(nn.Module):
    """PyTorch's own layer, whose out_proj is never called as a module."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class VitBlock(nn.Module):
    def __init__(self, dim: int, attention: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VitLike(nn.Module):
    """Patches, a class token and learnt positions (bare parameters), two blocks."""

    def __init__(
        self, dim: int = 8, attention: type[nn.Module] = Attention, size: int = 8, num_classes: int = 3
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, stride=4)
        self.cls_token = nn.Parameter(0.1 * torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, (size // 4) ** 2 + 1, dim))
        self.blocks = nn.Sequential(VitBlock(dim, attention(dim, 2)), VitBlock(dim, attention(dim, 2)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class MobileBlock(nn.Module):
    """Inverted residual as MobileNetV3 has it: batch norm, in-place hard-swish."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        middle = 2 * inputs
        self.conv = nn.Sequential(
            nn.Conv2d(inputs, middle, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.Hardswish(inplace=True),
            nn.Conv2d(middle, middle, 3, stride, 1, groups=middle, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU6(inplace=True),
            nn.Conv2d(middle, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetLike(nn.Module):
    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(inplace=True),
            MobileBlock(8, 8, 1),
            MobileBlock(8, 12, 2),
            MobileBlock(12, 12, 1),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(12, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class TiedNet(nn.Module):
    """One convolution used twice, and one batch norm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.conv = nn.Conv2d(6, 6, 3, padding=1)
        norm = nn.BatchNorm2d(6)
        self.norm1, self.norm2 = norm, norm
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv(self.stem(x))))
        return self.head(torch.relu(self.norm2(self.conv(x))).mean([2, 3]))


class FoldedVit(nn.Module):
    """As in MobileViT: pixels of a patch are folded into the batch, so layers see more rows than images."""

    def __init__(self, dim: int = 8, num_classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 3, stride=2, padding=1)
        self.transformer = nn.Sequential(VitBlock(dim, Attention(dim, 2)), VitBlock(dim, Attention(dim, 2)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        batch, dim, height, width = x.shape
        patches = x.reshape(batch, dim, height // 2, 2, width // 2, 2).permute(0, 3, 5, 2, 4, 1)
        tokens = self.norm(self.transformer(patches.reshape(batch * 4, -1, dim)))
        return self.head(tokens.reshape(batch, -1, dim).mean(1))


class VectorNorm(nn.Module):
    """A norm on vectors, as heads with BatchNorm1d have it, and one learnt temperature without a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3 * 8 * 8, 12)
        self.norm = nn.BatchNorm1d(12)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.temperature * self.head(torch.relu(self.norm(self.embed(x.flatten(1)))))
