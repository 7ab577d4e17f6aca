"""Networks for the examples: two in plain torch, and torchvision's if it is installed.

cnn       four convolutions, for trials on a CPU
resnet9   the usual small residual network for 32 x 32 images
resnet18, resnet50, vit_b_16   torchvision's, without pretrained weights
"""

from __future__ import annotations

import torch
from torch import nn

PLAIN = ("cnn", "resnet9")
TORCHVISION = ("resnet18", "resnet50", "vit_b_16")
MODELS = PLAIN + TORCHVISION
VIT_PATCH = 16


class ModelError(ValueError):
    """Raised if a network is not available, or does not support images of this size."""


def make_model(name: str, num_classes: int, image_size: tuple[int, int]) -> nn.Module:
    """Return a network with fresh weights for images (3, height, width)."""
    if name == "cnn":
        return small_cnn(num_classes)
    if name == "resnet9":
        return resnet9(num_classes)
    try:
        import torchvision
    except (ImportError, RuntimeError) as error:  # RuntimeError if it was built for another version of torch
        remedy = f"pip install torchvision, or use {' or '.join(PLAIN)}"
        raise ModelError(f"{name} is torchvision's, which cannot be imported ({error}): {remedy}") from None
    options = {"image_size": _vit_image_size(image_size)} if name == "vit_b_16" else {}
    return getattr(torchvision.models, name)(num_classes=num_classes, **options)


def _vit_image_size(image_size: tuple[int, int]) -> int:
    height, width = image_size
    if height != width or height % VIT_PATCH:
        raise ModelError(
            f"vit_b_16 needs squares whose side is a multiple of {VIT_PATCH}, but the images are {height} x {width}: "
            "convert with --size 224,224 --fit crop"
        )
    return height


def conv_block(inputs: int, outputs: int, *, stride: int = 1) -> nn.Sequential:
    """Return a 3 x 3 convolution with batch normalisation and ReLU."""
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def head(inputs: int, num_classes: int) -> nn.Sequential:
    """Return a head with one output per class, for feature maps of any size."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))


def small_cnn(num_classes: int) -> nn.Sequential:
    """Return a network of four convolutions, each of which halves the image; quick on a CPU."""
    first = (conv_block(3, 16, stride=3), conv_block(16, 32, stride=2))
    second = (conv_block(32, 64, stride=2), conv_block(64, 64, stride=2))
    return nn.Sequential(*first, *second, head(64, num_classes))


class Residual(nn.Module):
    """Two convolution blocks with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_block(width, width), conv_block(width, width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.body(images)


def resnet9(num_classes: int) -> nn.Sequential:
    """Return a ResNet of eight convolutions, two skip connections and a linear layer, for images of at least 8 x 8."""
    stem = conv_block(3, 64)
    first = (conv_block(64, 128), nn.MaxPool2d(2), Residual(128))
    second = (conv_block(128, 256), nn.MaxPool2d(2))
    third = (conv_block(256, 512), nn.MaxPool2d(2), Residual(512))
    return nn.Sequential(stem, *first, *second, *third, head(512, num_classes))
