"""Prepare images of any size for storage, encoded or as raw pixels, and optionally shrink large ones."""

from __future__ import annotations

import io

from PIL import Image

from h5chunk.errors import MAX_SIDE, SampleError
from h5chunk.sample_source import AnyImage
from h5chunk.sources.decode import decode
from h5chunk.sources.kinds import ImageOptions


def make_any_image(image: bytes | Image.Image, options: ImageOptions) -> AnyImage:
    """Decode an image to validate it, and return it in the form in which ``options`` store it.

    ``image`` is encoded, as bytes, or opened by Pillow. Call this within `pillow_limits`. Raises SampleError if the
    image is refused.
    """
    decoded = decode(image, options)
    pixels, notes, orientation = decoded.image, decoded.notes, 1
    is_large = options.max_side is not None and max(pixels.size) > options.max_side
    if is_large:
        pixels, notes = _shrunk(pixels, options.max_side or 0), (*notes, "resized")
    if max(pixels.size) > MAX_SIDE:
        raise SampleError(
            f"is {pixels.height} x {pixels.width}, but loaders support at most {MAX_SIDE} pixels per side: shrink it "
            f"with max_side={MAX_SIDE} or less (--max-side)"
        )
    if options.form == "raw":
        data = pixels.tobytes()
    elif is_large:
        data = _encoded(pixels, "JPEG", quality=options.quality)
    elif isinstance(image, bytes):
        data, orientation = image, decoded.remaining
    else:
        data, notes = _encoded(pixels, "PNG"), (*notes, "encoded as PNG")
    return AnyImage(data, pixels.height, pixels.width, orientation, notes)


def _shrunk(image: Image.Image, max_side: int) -> Image.Image:
    scale = max_side / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)


def _encoded(image: Image.Image, format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()
