"""ResNet-18 (He et al., CVPR 2016) with the parameter names of torchvision's, so that its checkpoints fit."""

from collections.abc import Callable

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]
WIDTHS = (64, 128, 256, 512)


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inside: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1 or inside != width:
            self.downsample = nn.Sequential(nn.Conv2d(inside, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        """relu(two convolutions + shortcut)."""
        short = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu(x + short)
        return out


class ResNet18(nn.Module):
    """Eight blocks in four stages behind a 7x7 convolution; the mean over places goes into the head, `fc`."""

    def __init__(self, channels: int, classes: int, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, WIDTHS[0], 7, 2, 3, bias=False)
        self.bn1 = norm(WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inside = WIDTHS[0]
        for stage, width in enumerate(WIDTHS, 1):
            blocks = Block(inside, width, 1 if stage == 1 else 2, norm), Block(width, width, 1, norm)
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            inside = width
        self.fc = nn.Linear(WIDTHS[-1], classes)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """The logits."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(1, len(WIDTHS) + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def resnet18(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-18 with BatchNorm: the paper's network for FLAIR."""
    return ResNet18(input_shape[0], classes)


def resnet18_gn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The same with GroupNorm of two groups, which has no running statistics."""
    return ResNet18(input_shape[0], classes, lambda width: nn.GroupNorm(2, width))
