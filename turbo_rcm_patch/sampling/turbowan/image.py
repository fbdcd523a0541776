"""The first frame of an image-to-video generation: its size and its values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import torch
from PIL import Image, UnidentifiedImageError

from turbo_rcm_patch.errors import SamplingError

__all__ = ["adapted_size", "read_image"]

_STRIDE: Final = 16


def adapted_size(image: tuple[int, int], area: tuple[int, int]) -> tuple[int, int]:
    """Width and height with an image's aspect ratio and about the area of another size.

    Args:
        image: Width and height of the image.
        area: Width and height whose product is aimed at.

    Returns:
        Width and height, the nearest multiples of 16.
    """
    pixels, ratio = area[0] * area[1], image[1] / image[0]
    ideal = math.sqrt(pixels / ratio), math.sqrt(pixels * ratio)
    width, height = (max(1, round(side / _STRIDE)) * _STRIDE for side in ideal)
    return width, height


def read_image(path: str | Path) -> torch.Tensor:
    """An image file as uint8, [1, 3, H, W].

    Raises:
        SamplingError: There is none, or it is no image.
    """
    try:
        with Image.open(Path(path).expanduser()) as image:
            rgb = image.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise SamplingError(
            f"--image_path: {path} cannot be read as an image",
            expected="a file such as a PNG or a JPEG",
            got=f"{type(error).__name__}: {error}",
        ) from error
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(1, rgb.height, rgb.width, 3).permute(0, 3, 1, 2).contiguous()


def fitted(image: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """Stretched to a size and scaled to 0..1, as the models were distilled.

    Bilinear with antialiasing on bytes, where diffusers' pipeline would use Lanczos.

    Args:
        image: uint8, [1, 3, H, W].
        width: Of the video.
        height: Of the video.

    Returns:
        fp32, [1, 3, height, width].
    """
    if image.shape[-2:] != (height, width):
        image = torch.nn.functional.interpolate(
            image, (height, width), mode="bilinear", antialias=True, align_corners=False
        )
    return image.to(torch.float32) / 255
