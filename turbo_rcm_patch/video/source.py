"""`Source`: a prompt, and for some pipelines an image, to make a video from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import ExifTags, Image, ImageOps

from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.files import check_regular

#: An image: a file, or one of PIL's.
ImageLike: TypeAlias = str | Path | Image.Image


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The source of one video.

    An image is read when a source is made, so that a missing or broken file is known before a
    model is loaded, and again when it is used: many sources hold no pixels.

    Attributes:
        prompt: The prompt.
        image: The first frame, which the pipeline resizes to the size of the video.

    Raises:
        SamplingError: The image is missing or unreadable.
    """

    prompt: str
    image: ImageLike | None = None

    def __post_init__(self) -> None:
        self.read()

    def read(self) -> Image.Image | None:
        """Return the image, read from its file."""
        return None if self.image is None else read_image(self.image)

    @property
    def digest(self) -> str:
        """A digest of every pixel, "" without an image."""
        return digest_of(self.read())


def digest_of(image: Image.Image | None) -> str:
    """Compute a digest of every pixel of an image, "" if there is none."""
    if image is None:
        return ""
    content = f"image {image.size}".encode() + image.tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def read_image(source: ImageLike) -> Image.Image:
    """Read an image as RGB.

    Args:
        source: A file, or an image of PIL's.

    Raises:
        SamplingError: The file is missing, or holds no image.
    """
    if isinstance(source, Image.Image):
        return _as_rgb(source)
    path = Path(source).expanduser()
    check_regular(path, SamplingError)
    try:
        with Image.open(path) as image:
            return _as_rgb(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise SamplingError(
            f"image {path} cannot be read ({getattr(error, 'strerror', None) or error})",
            expected="a PNG, JPEG, WebP or another file that Pillow reads",
            remedy="Check its name and permissions, or convert it: `ffmpeg -i FILE image.png`",
        ) from error


def _as_rgb(image: Image.Image) -> Image.Image:
    """Rotate an image as its EXIF data say, and convert it to 8 bits a channel."""
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits, which `convert` would cut off at 255.
        levels = np.asarray(image).astype(np.float64) / 257
        image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def sources_of(
    prompts: str | Sequence[str], images: ImageLike | Sequence[ImageLike] | None = None
) -> list[Source]:
    """Return one source a prompt.

    Args:
        prompts: One or many.
        images: One image for all prompts, or one for each.

    Raises:
        SamplingError: No prompt, an empty one, or another number of images than of prompts.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts or any(not text.strip() for text in texts):
        expected = "at least one, none of them empty"
        raise SamplingError("prompts", expected=expected, got=repr(texts))
    if isinstance(images, (str, Path, Image.Image)):
        images = [read_image(images)] * len(texts)
    if images is None:
        return [Source(text) for text in texts]
    if len(images) != len(texts):
        expected = f"one, or one for each of {len(texts)} prompts"
        raise SamplingError("images", expected=expected, got=f"{len(images)}")
    return [*map(Source, texts, images)]
