"""Record a world: what ViZDoom's camera sees in the maps of Freedoom, with prompts.

A clip is drawn by a policy (walk, turn, strafe, fight, stand) from a random place of a map. Its
prompt says what was done, and what frames, depth and the camera's angle say of place and motion.
A shard is one process' work: its name alone decides its bytes, and a shard that exists is not
recorded again. Every fifth map of a game is left out; the prompts of `world_prompts.txt` are of
those.

Needs the package `vizdoom`, which brings both Freedoom files (see ARTWORK.md beside the weights).
"""

from __future__ import annotations

import colorsys
import math
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image

from turbo_rcm_patch.files import atomic

Picture = np.ndarray[Any, Any]

_CAMPAIGNS: Final = {
    "freedoom1.wad": [f"E{e}M{m}" for e in range(1, 5) for m in range(1, 10)],
    "freedoom2.wad": [f"MAP{m:02}" for m in range(1, 33)],
}
_HELD_OUT_EVERY: Final = 5
#: Policy -> share in percent, and its beginning of a prompt.
_POLICIES: Final = {
    "walk": (40, "walking through"), "turn": (20, "turning in"), "strafe": (15, "sidestepping in"),
    "fight": (20, "fighting a {} in"), "stand": (5, "standing in"),
}  # fmt: skip
#: ViZDoom's name of a monster -> what Freedoom shows.
_MONSTERS: Final = {
    "Zombieman": "zombie", "ShotgunGuy": "soldier", "DoomImp": "serpent", "Demon": "worm",
    "Cacodemon": "trilobite", "HellKnight": "knight",
}  # fmt: skip
_LIGHTS, _SPACES = ("dark", "dim", "bright"), ("narrow", "wide", "vast")
_HUES: Final = {"brown": 50, "green": 150, "blue": 250, "purple": 320, "red": 361}  # they end here
_BUTTONS: Final = (
    "MOVE_FORWARD", "MOVE_LEFT_RIGHT_DELTA", "TURN_LEFT_RIGHT_DELTA", "ATTACK", "USE"
)  # fmt: skip
_VARIABLES: Final = ("POSITION_X", "POSITION_Y", "ANGLE")
_TICS: Final = 2  # of 35 a second, a frame
_GAME_OPTIONS: Final = "+con_midtime 0 +movebob 0.15"
#: Games are made for dark rooms: each value of a picture, brighter.
_GAMMA: Final = [round(255 * (value / 255) ** (1 / 1.5)) for value in range(256)] * 3
#: Least mean and spread of pixels; least change between frames, of a camera that stands and moves.
_LEAST_MEAN, _LEAST_SPREAD, _LEAST_STANDING, _LEAST_MOVING = 24.0, 10.0, 0.05, 2.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Clips of one shape.

    Attributes:
        name: What it is called.
        frames, height, width: Shape of a clip.
        clips: Number in a shard, which is a file.
        shards: Number of them for training.
        share: Of the steps of training.
    """

    name: str
    frames: int
    height: int
    width: int
    clips: int = 32
    shards: int = 1
    share: float = 1.0

    @property
    def pixels(self) -> int:
        """Pixels of a clip."""
        return self.frames * self.height * self.width


def words() -> list[str]:
    """Every word of the prompts, sorted."""
    sentence = "a base grey camera still moving left right slowly quickly ahead"
    phrases = sentence.split(" ") + [
        word for _, phrase in _POLICIES.values() for word in phrase.split()
    ]
    every = chain(phrases, _MONSTERS.values(), _LIGHTS, _SPACES, _HUES)
    return sorted(set(every) - {"{}"})


def caption(policy: str, monster: str, look: str, camera: str) -> str:
    """Return the sentence of a clip; `look` says light, colour and space."""
    return f"{_POLICIES[policy][1].format(monster)} a {look} base, camera {camera}"


def light_and_colour(frames: Picture) -> tuple[str, str]:
    """Light and colour of frames, uint8 [F, H, W, 3], in words."""
    red, green, blue = frames.mean((0, 1, 2)).tolist()
    hue, saturation, _ = colorsys.rgb_to_hsv(red / 255, green / 255, blue / 255)
    light = _LIGHTS[sum((red + green + blue) / 3 > least for least in (62, 92))]
    colour = next(name for name, end in _HUES.items() if (hue * 360 - 15) % 360 < end)
    return light, "grey" if saturation < 0.15 else colour


def maps_of(game: str) -> list[str]:
    """The maps of a game that are for training."""
    return [name for i, name in enumerate(_CAMPAIGNS[game], 1) if i % _HELD_OUT_EVERY]


def shard_path(folder: Path, bucket: Bucket, index: int) -> Path:
    """A file of frames, uint8 [n, F, H, W, 3], and their prompts."""
    return folder / f"{bucket.name}-{index:05}.pt"


def record(bucket: Bucket, indices: Sequence[int], folder: Path) -> Iterator[Path]:
    """Record missing shards in many processes; yield the path of every shard, in order."""
    missing = [i for i in indices if not shard_path(folder, bucket, i).exists()]
    if not missing:
        yield from (shard_path(folder, bucket, i) for i in indices)
        return
    processes = min(len(os.sched_getaffinity(0)), len(missing))
    with get_context("spawn").Pool(processes, _obey_parent) as pool:
        yield from pool.imap(partial(record_shard, folder, bucket), indices)


def _obey_parent() -> None:
    """Leave Ctrl-C to the parent, whose end of the pool closes the game."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def record_shard(folder: Path, bucket: Bucket, index: int) -> Path:
    """Record a shard unless it exists."""
    path = shard_path(folder.resolve(), bucket, index)
    if path.exists():
        return path
    # 0 was a seed, and False "held out": another text would change every shard.
    rng = random.Random(f"0 {bucket.name} {index} False")
    game = rng.choice(list(_CAMPAIGNS))
    maps = rng.sample(maps_of(game), min(4, bucket.clips))
    frames = np.empty((bucket.clips, bucket.frames, bucket.height, bucket.width, 3), np.uint8)
    prompts: list[str] = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        chdir(scratch),  # the game writes where it is
        closing(_Camera(game, bucket)) as camera,
    ):
        starts = {name: camera.starts(name) for name in maps}
        for i, clip in enumerate(frames):
            prompt = None
            while prompt is None:
                name = maps[(i + rng.randrange(2)) % len(maps)]
                prompt = camera.record(rng, name, starts[name], clip)
            prompts.append(prompt)
    with atomic(path) as partial_path:
        torch.save((torch.from_numpy(frames), prompts), partial_path)
    return path


@dataclass(frozen=True, slots=True)
class _Plan:
    """The plan of a clip: a policy, a side (-1 or 1), degrees a frame, a monster to fight."""

    policy: str
    side: int
    speed: float
    monster: str

    @property
    def travels(self) -> bool:
        """True if the camera goes somewhere."""
        return self.policy in ("walk", "strafe")

    def buttons(self, step: int, room: Sequence[float] = (1, 1, 1)) -> list[float]:
        """Return the values of `_BUTTONS` in a step, where the camera sees so much room."""
        left, ahead, right = room
        if self.policy == "walk":  # towards the deeper side
            steer = 9 * (right - left) / (left + right + 1) + 0.3 * self.side
            return [25, 0, max(-3, min(3, steer)), 0, ahead < 12]
        if self.policy == "turn":
            return [0, 0, self.side * self.speed, 0, 0]
        if self.policy == "strafe":
            return [0, self.side * 18, 0, 0, 0]
        if self.policy == "fight":
            return [0, 0, 0.8 * self.side * math.sin(step / 4), step % 12 < 6, 0]
        return [0, 0, 0, 0, 0]


class _Camera:
    """A running game."""

    def __init__(self, game: str, bucket: Bucket) -> None:
        import vizdoom

        self._size, self._map = (bucket.height, bucket.width), ""
        self._game = doom = vizdoom.DoomGame()
        doom.set_doom_config_path(str(Path("game.ini").resolve()))
        doom.set_doom_game_path(str(Path(vizdoom.__file__).parent / game))
        # Larger than the clip, which is less jagged.
        size = "512X320" if bucket.width <= 320 else "1024X576"
        doom.set_screen_resolution(getattr(vizdoom.ScreenResolution, f"RES_{size}"))
        doom.set_screen_format(vizdoom.ScreenFormat.RGB24)
        doom.set_depth_buffer_enabled(True)
        doom.set_objects_info_enabled(True)
        for drawn in ("hud", "messages", "crosshair", "decals", "screen_flashes"):
            getattr(doom, f"set_render_{drawn}")(False)
        doom.add_game_args(_GAME_OPTIONS)
        doom.set_window_visible(False)
        doom.set_mode(vizdoom.Mode.PLAYER)
        doom.set_available_buttons([getattr(vizdoom.Button, name) for name in _BUTTONS])
        variables = [getattr(vizdoom.GameVariable, name) for name in _VARIABLES]
        doom.set_available_game_variables(variables)
        doom.init()

        self.close = doom.close

    def _begin(self, name: str, seed: int) -> None:
        if name != self._map:  # Loading a map takes longer than recording a clip.
            self._game.set_doom_map(name)
            self._map = name
        self._game.set_seed(seed)
        self._game.new_episode()

    def starts(self, name: str) -> list[tuple[int, int]]:
        """Where things lie in a map, so that one may stand there."""
        self._begin(name, 0)
        things = self._game.get_state().objects
        return [(round(thing.position_x), round(thing.position_y)) for thing in things]

    def _turn(self, degrees: float, tics: int = 1) -> None:
        self._game.make_action([0, 0, degrees, 0, 0], tics)

    def record(
        self, rng: random.Random, name: str, starts: Sequence[tuple[int, int]], frames: Picture
    ) -> str | None:
        """Fill `frames` in a map; return the prompt, or None if they show too little."""
        plan = _Plan(
            policy=rng.choices(list(_POLICIES), [share for share, _ in _POLICIES.values()])[0],
            side=rng.choice((-1, 1)),
            speed=rng.uniform(0.7, 2.6),
            monster=rng.choice(list(_MONSTERS)),
        )
        self._begin(name, rng.randrange(2**31))
        self._set_out(rng, plan, starts)
        room, poses = list[list[float]](), list[Picture]()
        for i, frame in enumerate(frames):
            state = self._game.get_state()
            if state is None:  # the level or the episode ended
                return None
            frame[:] = self._picture(state.screen_buffer)
            room.append(_room(state.depth_buffer))
            poses.append(state.game_variables)
            if plan.travels and i and math.dist(poses[-1][:2], poses[-2][:2]) < 1:
                return None
            self._game.make_action(plan.buttons(i, room[-1]), _TICS)
        angles, depth = np.array(poses)[:, 2], float(np.mean(room, 0)[1])
        return _describe(plan, frames, angles, depth)

    def _set_out(self, rng: random.Random, plan: _Plan, starts: Sequence[tuple[int, int]]) -> None:
        """Go to a random place, face where there is room, and begin what the clip shows."""
        command = self._game.send_game_command
        fights = plan.policy == "fight"
        for text in ("god",) if fights else ("god", "notarget", "take weapons"):
            command(text)
        command("warp {} {}".format(*rng.choice(starts)))
        self._turn(rng.uniform(-180, 180), 12)
        views = []
        for _ in range(8):
            self._turn(45)
            views.append(_room(self._game.get_state().depth_buffer)[1])
        self._turn(45 * (views.index(max(views)) - 7))
        if fights:
            self._turn(0, 25)
            command(f"summon {plan.monster}")
        if plan.travels:  # come up to speed
            self._game.make_action(plan.buttons(0), _TICS)

    def _picture(self, screen: Picture) -> Picture:
        height, width = self._size
        image = Image.fromarray(screen)
        scale = max(height / image.height, width / image.width)
        size = round(image.width * scale), round(image.height * scale)
        left, top = (size[0] - width) // 2, (size[1] - height) // 2
        image = image.resize(size, Image.Resampling.HAMMING)
        return np.asarray(image.crop((left, top, left + width, top + height)).point(_GAMMA))


def _room(depth: Picture) -> list[float]:
    """Depth at eye level: on the left, ahead, on the right."""
    rows = slice(int(depth.shape[0] * 0.45), int(depth.shape[0] * 0.55))
    return [float(part.mean()) for part in np.array_split(depth[rows, ::4], 3, axis=1)]


def _describe(plan: _Plan, frames: Picture, angles: Picture, depth: float) -> str | None:
    """Return the prompt of a clip, or None if it shows too little."""
    seen = frames[:, ::4, ::4].astype(np.float32)
    change = float(np.abs(np.diff(seen, axis=0)).mean())
    dark_or_flat = seen.mean() < _LEAST_MEAN or seen.std((1, 2, 3)).min() < _LEAST_SPREAD
    least_change = _LEAST_STANDING if plan.policy == "stand" else _LEAST_MOVING
    if dark_or_flat or change < least_change or depth < 5:  # so near is a wall alone
        return None
    rate = float(((np.diff(angles) + 180) % 360 - 180).mean())  # degrees a frame, to the left
    way = "left" if rate > 0 else "right"
    camera = {
        "walk": "moving ahead" if abs(rate) < 1 else f"moving {way}",
        "turn": f"turning {way} {'slowly' if abs(rate) < 3 else 'quickly'}",
        "strafe": f"moving {'right' if plan.side > 0 else 'left'}",
    }.get(plan.policy, "still")
    light, colour = light_and_colour(frames)
    space = _SPACES[sum(depth > least for least in (20, 45))]
    look = f"{light} {colour} {space}"
    return caption(plan.policy, _MONSTERS[plan.monster], look, camera)
