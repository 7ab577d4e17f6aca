"""Make a folder of labelled images that a small CNN can learn, one folder per class.

    python scripts/make_images.py photos --count 12000 --size 224 224 --classes 10

Each image is a grating whose direction and spacing depend on its class, over grainy coloured noise with the spectrum of
photographs. As JPEGs the images take about as long to decode as photographs. Prints the folder, the number of images
and their mean size in bytes. Equal arguments give equal images. Existing images are kept.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

BANK = 24  # number of noise fields from which all images are cut, because making them is slower than encoding


def noise_bank(height: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noise with the spectrum of photographs (1/f), and grain, each (BANK, 2 * height, 2 * width) float32."""
    rng = np.random.default_rng([seed, 1])
    shape = (2 * height, 2 * width)
    fy, fx = np.meshgrid(np.fft.fftfreq(shape[0]), np.fft.rfftfreq(shape[1]), indexing="ij")
    spectrum = 1 / np.maximum(np.hypot(fy, fx), 1 / max(shape))
    fields = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((BANK, *shape))) * spectrum, s=shape)
    fields /= fields.std(axis=(1, 2), keepdims=True)
    return fields.astype(np.float32), rng.standard_normal((BANK, *shape)).astype(np.float32)


def make_image(number: int, label: int, args: argparse.Namespace, bank: tuple[np.ndarray, np.ndarray]) -> Image.Image:
    """Make image ``number`` of class ``label``."""
    rng = np.random.default_rng([args.seed, number])
    height, width = args.size
    fields, grain = bank

    def cut(fields: np.ndarray) -> np.ndarray:
        y, x = rng.integers(0, height + 1), rng.integers(0, width + 1)
        return fields[rng.integers(BANK), y : y + height, x : x + width]

    angle = np.pi * label / args.classes + rng.normal(0, 0.06)
    cycles = 4 + 3 * (label % 3)
    y, x = np.mgrid[:height, :width].astype(np.float32) / max(height, width)
    wave = np.sin(2 * np.pi * cycles * (np.cos(angle) * x + np.sin(angle) * y) + rng.uniform(0, 6.3)).astype(np.float32)
    base = rng.uniform(80, 170, 3)
    planes = [base[c] + 22 * wave + 28 * cut(fields) + args.grain * cut(grain) for c in range(3)]
    return Image.fromarray(np.clip(np.stack(planes, axis=-1), 0, 255).astype(np.uint8))


def make_share(args: argparse.Namespace, share: int, shares: int) -> int:
    """Make every ``shares``-th image, starting with ``share``; return the total bytes."""
    bank = noise_bank(*args.size, args.seed)
    total = 0
    for number in range(share, args.count, shares):
        label = number % args.classes
        path = args.folder / f"class{label:02d}" / f"{number:07d}.{args.format}"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            image = make_image(number, label, args, bank)
            image.save(part, format="JPEG" if args.format == "jpg" else "PNG", quality=args.quality)
            part.rename(path)
        total += path.stat().st_size
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--size", type=int, nargs=2, default=(64, 64), metavar=("H", "W"))
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--quality", type=int, default=92, help="JPEG quality")
    parser.add_argument("--grain", type=float, default=10, help="noise of single pixels, in levels of grey")
    parser.add_argument("--format", choices=["jpg", "png"], default="jpg")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shares = os.cpu_count() or 1
    with ProcessPoolExecutor(shares) as pool:
        total = sum(pool.map(make_share, [args] * shares, range(shares), [shares] * shares))
    print(f"{args.folder}: {args.count} images in {args.classes} classes, {total / args.count:,.0f} bytes each")


if __name__ == "__main__":
    main()
