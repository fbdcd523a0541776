"""`Source`: a prompt, and for some pipelines an image or a video, to make a video from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from safetensors import SafetensorError
from safetensors.torch import load_file

from turbo_rcm_patch.checkpoints.pipeline import check_regular
from turbo_rcm_patch.errors import SamplingError
from turbo_rcm_patch.video.video import read_frames

#: An image: a file, or one of PIL's.
ImageLike: TypeAlias = str | Path | Image.Image
#: A video: a file, or its frames.
VideoLike: TypeAlias = str | Path | Sequence[Image.Image]
#: Fewest pixels a side of what a video is made from.
_LEAST: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The source of one video. Each pipeline takes some of it; `PipelineFamily` says which.

    Files are read when a source is made, so that a missing or broken one is known before a model
    is loaded, and again when they are used: many sources hold few pixels. Pipelines resize what
    they are given to the size of the video.

    Attributes:
        prompt: The prompt.
        image: The first frame.
        last_image: The last frame, for a model that was trained with one.
        video: The frames to begin with, or (VACE) those that control the video.
        mask: Where `video` is made anew (white): one image a frame, or one for all. For Animate
            where the person is put, one a frame.
        reference: Images of what the video shows.
        pose: For Animate the poses, drawn as a video.
        face: For Animate the faces, one a frame.
        background: For Animate the video whose person is replaced.
        identity: For ConsisID the output of its face models on the image: `id_cond`,
            `id_vit_hidden.0` to `.4` and, where the model takes keypoints, `face_kps`; a
            .safetensors file or tensors by these names.

    Raises:
        SamplingError: A file is missing, unreadable, or smaller than 16 pixels a side.
    """

    prompt: str
    image: ImageLike | None = None
    last_image: ImageLike | None = None
    video: VideoLike | None = None
    mask: VideoLike | None = None
    reference: Sequence[ImageLike] | None = None
    pose: VideoLike | None = None
    face: VideoLike | None = None
    background: VideoLike | None = None
    identity: str | Path | Mapping[str, torch.Tensor] | None = None

    def __post_init__(self) -> None:
        for name, one in _images(self.media):
            if min(one.size) < _LEAST:
                expected, got = f"at least {_LEAST} pixels a side", f"{one.width} x {one.height}"
                remedy = "Give a larger picture"
                raise SamplingError(name, expected=expected, got=got, remedy=remedy)

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the fields that are given beside the prompt."""
        names = [field.name for field in fields(self) if field.name != "prompt"]
        return tuple(name for name in names if getattr(self, name) is not None)

    @property
    def media(self) -> Mapping[str, Any]:
        """The other fields that are given, read from their files: an image, a list of images, or
        tensors by their names."""
        read: dict[str, Any] = {}
        for name in self.given:
            value = getattr(self, name)
            if name == "identity":
                read[name] = _tensors(value)
            elif isinstance(value, Image.Image) or name in _ONE:
                read[name] = read_image(value, name)
            elif isinstance(value, (str, Path)):
                read[name] = read_frames(Path(value), name)
            else:
                read[name] = [read_image(one, name) for one in value]
        return read

    @property
    def digest(self) -> str:
        """A digest of every pixel that is given beside the prompt, "" if none is."""
        return digest_of(self.media)


def digest_of(media: Mapping[str, Any]) -> str:
    """Compute a digest of `Source.media`, "" if there is none."""
    if not media:
        return ""
    digest = hashlib.blake2b(digest_size=8)
    for name, one in _images(media):
        digest.update(f"{name} {one.size}".encode())
        digest.update(one.tobytes())
    for name, tensor in sorted(media.get("identity", {}).items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


#: Fields that hold one image.
_ONE: Final = ("image", "last_image")
#: Tensors that ConsisID's transformer needs.
_IDENTITY: Final = ("id_cond", *(f"id_vit_hidden.{i}" for i in range(5)))


def _tensors(given: str | Path | Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read the tensors of an identity.

    Raises:
        SamplingError: The file cannot be read, or lacks some.
    """
    if isinstance(given, Mapping):
        found = dict(given)
    else:
        try:
            path = Path(given).expanduser()
            check_regular(path, SamplingError)
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            what = f"identity {given} cannot be read ({error})"
            raise SamplingError(what, expected="a .safetensors file") from error
    missing = [name for name in _IDENTITY if name not in found]
    if missing:
        expected = f"the tensors {', '.join(_IDENTITY)}"
        got = ", ".join(sorted(found)) or "none"
        remedy = "Save what diffusers' process_face_embeddings_infer gives (docs/comparing.md)"
        raise SamplingError("identity", expected=expected, got=got, remedy=remedy)
    return found


def _images(media: Mapping[str, Any]) -> list[tuple[str, Image.Image]]:
    """List every image with the name of its field."""
    return [
        (name, one)
        for name, value in media.items()
        if name != "identity"
        for one in ([value] if isinstance(value, Image.Image) else value)
    ]


def read_image(given: ImageLike, name: str = "image") -> Image.Image:
    """Read an image as RGB.

    Args:
        given: A file, or an image of PIL's.
        name: Its field, for messages.

    Raises:
        SamplingError: The file is missing, or holds no image.
    """
    if isinstance(given, Image.Image):
        return _as_rgb(given)
    path = Path(given).expanduser()
    check_regular(path, SamplingError)
    try:
        with Image.open(path) as image:
            return _as_rgb(image)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        what = f"{name} {path} cannot be read ({getattr(error, 'strerror', None) or error})"
        remedy = "Check its name, its permissions and whether it is complete"
        if isinstance(error, UnidentifiedImageError):
            what = f"{name} {path} is no image that can be read"
            remedy = "Convert it, for instance with `ffmpeg -i FILE image.png`"
        expected = "a PNG, JPEG, WebP or another file that Pillow reads"
        raise SamplingError(what, expected=expected, remedy=remedy) from error


def _as_rgb(image: Image.Image) -> Image.Image:
    """Turn an image the way up that its EXIF data say, in 8 bits a channel."""
    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits, which `convert` would cut off at 255.
        levels = np.asarray(image).astype(np.float64) / 257
        image = Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def sources_of(
    prompts: str | Source | Sequence[str | Source],
    images: ImageLike | Sequence[ImageLike] | None = None,
) -> list[Source]:
    """Return one source a prompt.

    Args:
        prompts: One or many; a source stays what it is.
        images: One image for all prompts, or one for each.

    Raises:
        SamplingError: No prompt, an empty one, or another number of images than of prompts.
    """
    given = [prompts] if isinstance(prompts, (str, Source)) else list(prompts)
    texts = [one.prompt if isinstance(one, Source) else one for one in given]
    if not given or any(not text.strip() for text in texts):
        expected = "at least one, none of them empty"
        raise SamplingError("prompts", expected=expected, got=repr(texts))
    if images is None:
        return [one if isinstance(one, Source) else Source(one) for one in given]
    if isinstance(images, (str, Path, Image.Image)):
        images = [read_image(images)] * len(given)
    if len(images) != len(given) or any(isinstance(one, Source) for one in given):
        expected = f"one, or one for each of {len(given)} prompts that are texts"
        remedy = "A `Source` holds its own image; leave images out"
        raise SamplingError("images", expected=expected, got=f"{len(images)}", remedy=remedy)
    return [Source(text, image=image) for text, image in zip(texts, images, strict=True)]
