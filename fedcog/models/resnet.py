"""ResNet-18 (He et al., CVPR 2016), with torchvision's parameter names so its checkpoints load."""

from collections.abc import Callable

from torch import Tensor, nn

NormLayer = Callable[[int], nn.Module]
STAGE_WIDTHS = (64, 128, 256, 512)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, a 1x1 convolution where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int, norm: NormLayer) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1 or in_channels != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), norm(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to images `(N, C, H, W)`."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        outputs: Tensor = self.relu(x + shortcut)
        return outputs


class ResNet18(nn.Module):
    """A 7x7 convolution, eight blocks in four stages, global average pooling, and the head `fc`."""

    def __init__(self, channels: int, num_classes: int, norm: NormLayer = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, STAGE_WIDTHS[0], 7, 2, 3, bias=False)
        self.bn1 = norm(STAGE_WIDTHS[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        in_channels = STAGE_WIDTHS[0]
        for stage, width in enumerate(STAGE_WIDTHS, 1):
            blocks = (
                Block(in_channels, width, 1 if stage == 1 else 2, norm),
                Block(width, width, 1, norm),
            )
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
            in_channels = width
        self.fc = nn.Linear(STAGE_WIDTHS[-1], num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits `(N, num_classes)` of images `(N, C, H, W)`."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(1, len(STAGE_WIDTHS) + 1):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def resnet18(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """ResNet-18 with BatchNorm: the paper's network for FLAIR.

    Args:
        input_shape: Shape of one input, `(C, H, W)`.
        num_classes: Number of classes.

    Returns:
        The network.
    """
    return ResNet18(input_shape[0], num_classes)


def resnet18_gn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """ResNet-18 with GroupNorm of two groups, which has no running statistics.

    Args:
        input_shape: Shape of one input, `(C, H, W)`.
        num_classes: Number of classes.

    Returns:
        The network.
    """
    return ResNet18(input_shape[0], num_classes, lambda width: nn.GroupNorm(2, width))
