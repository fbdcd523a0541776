"""Record a world: what ViZDoom's camera sees in the maps of Freedoom, with prompts.

A clip is drawn by a policy (walk, turn, strafe, fight, stand) from a random place of a map. Its
prompt says what was done, and what frames, depth and the camera's angle say of place and motion.
A shard is one process' work: its seed alone decides its bytes, and a shard that is there is not
recorded again. Every fifth map of a game is left out, for evaluation.

Needs the package `vizdoom`, which brings both Freedoom files (see training/ARTWORK.md).
"""

from __future__ import annotations

import colorsys
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from turbo_rcm_patch.errors import TurboRCMError
from turbo_rcm_patch.extras import missing as not_installed
from turbo_rcm_patch.files import atomic, write_json

Picture = np.ndarray[Any, Any]

_CAMPAIGNS: Final = {
    "freedoom1.wad": [f"E{e}M{m}" for e in range(1, 5) for m in range(1, 10)],
    "freedoom2.wad": [f"MAP{m:02}" for m in range(1, 33)],
}
#: Small maps for a purpose -> what they show.
_SCENARIOS: Final = {
    "deadly_corridor": "corridor", "defend_the_center": "arena", "defend_the_line": "hall",
    "health_gathering_supreme": "pit", "my_way_home": "maze", "deathmatch": "arena",
}  # fmt: skip
_SCENARIO_SHARE: Final = 0.1
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
HUES: Final = {"brown": 50, "green": 150, "blue": 250, "purple": 320, "red": 361}  # they end here
_TICS: Final = 2  # of 35 a second, a frame
_ATTEMPTS: Final = 60
_NO_MESSAGES_LITTLE_BOB: Final = "+con_midtime 0 +movebob 0.15"
#: Games are made for dark rooms: each value of a picture, brighter.
_GAMMA: Final = [round(255 * (value / 255) ** (1 / 1.5)) for value in range(256)] * 3
#: Least mean and spread of pixels; least change between frames, of a camera that stands and moves.
_LEAST: Final = (24.0, 10.0, 0.05, 2.0)


class RecordingError(TurboRCMError, RuntimeError):
    """Nothing worth keeping could be recorded."""


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


@dataclass(frozen=True, slots=True)
class Shard:
    """What one process records: the shard with this number."""

    bucket: Bucket
    index: int
    seed: int = 0

    def path(self, folder: Path) -> Path:
        """Frames, uint8 [n, F, H, W, 3]; facts and prompts are beside them, in JSON."""
        return folder / f"{self.bucket.name}-train-{self.seed}-{self.index:05}.npy"


def words() -> list[str]:
    """Every word of the prompts, sorted."""
    sentence = "a base grey camera still moving left right slowly quickly ahead"
    phrases = sentence.split(" ") + [
        word for _, phrase in _POLICIES.values() for word in phrase.split()
    ]
    every = chain(phrases, _SCENARIOS.values(), _MONSTERS.values(), _LIGHTS, _SPACES, HUES)
    return sorted(set(every) - {"{}"})


def caption(facts: dict[str, Any]) -> str:
    """The sentence of a clip."""
    does = _POLICIES[facts["policy"]][1].format(facts["monster"])
    place = " ".join(facts[name] for name in ("light", "colour", "space", "place"))
    return f"{does} a {place}, camera {facts['camera']}"


def look(frames: Picture) -> tuple[str, str]:
    """Light and colour of frames, uint8 [F, H, W, 3], in words."""
    red, green, blue = frames.mean((0, 1, 2)).tolist()
    hue, saturation, _ = colorsys.rgb_to_hsv(red / 255, green / 255, blue / 255)
    light = _LIGHTS[sum((red + green + blue) / 3 > least for least in (62, 92))]
    colour = next(name for name, end in HUES.items() if (hue * 360 - 15) % 360 < end)
    return light, "grey" if saturation < 0.15 else colour


def maps_of(game: str) -> list[str]:
    """The maps of a game that are for training."""
    return [name for i, name in enumerate(_CAMPAIGNS[game], 1) if i % _HELD_OUT_EVERY]


def record(shards: Sequence[Shard], folder: Path, processes: int = 0) -> Iterator[Path]:
    """Record what is missing in many processes; yield each shard's path, in order."""
    missing = [shard for shard in shards if not shard.path(folder).exists()]
    if missing and find_spec("vizdoom") is None:
        raise not_installed("recording a world", "vizdoom")
    count = min(processes or len(os.sched_getaffinity(0)), len(missing))
    with get_context("spawn").Pool(count, _obey_parent) if missing else nullcontext() as pool:
        made = pool.imap(partial(record_shard, folder), missing) if pool else iter(())
        for shard in shards:
            yield next(made) if shard in missing else shard.path(folder)
        if pool:
            pool.close()
            pool.join()


def _obey_parent() -> None:
    """Leave Ctrl-C to the parent, whose end of the pool closes the game."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))


def record_shard(folder: Path, shard: Shard) -> Path:
    """Record a shard unless it is there.

    Raises:
        RecordingError: Too many attempts in a row showed nothing.
    """
    path, bucket = shard.path(folder.resolve()), shard.bucket
    if path.exists():
        return path
    rng = random.Random(f"{shard.seed} {bucket.name} {shard.index} False")
    game, scenario, place = rng.choice(list(_CAMPAIGNS)), "", "base"
    maps = rng.sample(maps_of(game), min(4, bucket.clips))
    if rng.random() < _SCENARIO_SHARE:
        game, maps = "freedoom2.wad", ["map01"]
        scenario, place = rng.choice(list(_SCENARIOS.items()))
    frames = np.empty((bucket.clips, bucket.frames, bucket.height, bucket.width, 3), np.uint8)
    facts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch):  # the game writes where it is
        config = Path(scratch) / "game.ini"
        with _Camera(game, scenario, None, config) as scout:
            starts = {name: scout.starts(name) for name in maps}
        with _Camera(game, scenario, bucket, config) as camera:
            for i in range(bucket.clips):
                for _ in range(_ATTEMPTS):
                    name = maps[(i + rng.randrange(2)) % len(maps)]
                    found = camera.clip(rng, name, starts[name], frames[i])
                    if found:
                        facts.append(
                            {"map": f"{scenario or game} {name}", "place": place, **found}
                        )
                        break
                else:
                    raise RecordingError(f"{path.name}: {maps} of {scenario or game} show nothing")
    write_json(path.with_suffix(".json"), [fact | {"prompt": caption(fact)} for fact in facts])
    with atomic(path) as partial_path, partial_path.open("wb") as file:
        np.save(file, frames)
    return path


class _Camera:
    """A running game. Without a bucket it only knows where things lie."""

    def __init__(self, game: str, scenario: str, bucket: Bucket | None, config: Path) -> None:
        import vizdoom

        self.api, self.bucket, self.map = vizdoom, bucket, ""
        self.game = own = vizdoom.DoomGame()
        data = Path(vizdoom.__file__).parent
        own.set_doom_config_path(str(config))
        own.set_doom_game_path(str(data / game))
        if scenario:
            own.set_doom_scenario_path(str(data / "scenarios" / f"{scenario}.wad"))
        # Larger than the clip, which is less jagged: 512 x 320, 800 x 450 or 1024 x 576.
        sizes = {0: "160X120", 320: "512X320", 450: "800X450", 4096: "1024X576"}
        size = next(
            text for least, text in sizes.items() if (bucket.width if bucket else 0) <= least
        )
        own.set_screen_resolution(getattr(vizdoom.ScreenResolution, f"RES_{size}"))
        own.set_screen_format(vizdoom.ScreenFormat.RGB24)
        own.set_depth_buffer_enabled(bucket is not None)
        own.set_objects_info_enabled(bucket is None)
        for drawn in ("hud", "messages", "crosshair", "decals", "screen_flashes"):
            getattr(own, f"set_render_{drawn}")(False)
        own.add_game_args(_NO_MESSAGES_LITTLE_BOB)
        own.set_window_visible(False)
        own.set_mode(vizdoom.Mode.PLAYER)
        keys = ("MOVE_FORWARD", "MOVE_LEFT_RIGHT_DELTA", "TURN_LEFT_RIGHT_DELTA", "ATTACK", "USE")
        own.set_available_buttons([getattr(vizdoom.Button, key) for key in keys])
        own.init()

    def __enter__(self) -> _Camera:
        return self

    def __exit__(self, *_: object) -> None:
        self.game.close()

    def _begin(self, name: str, seed: int) -> None:
        if name != self.map:
            self.game.set_doom_map(name)
            self.map = name
        self.game.set_seed(seed)
        self.game.new_episode()

    def starts(self, name: str) -> list[tuple[int, int]]:
        """Where things lie in a map, so that one may stand there."""
        self._begin(name, 0)
        found = self.game.get_state().objects
        return [(round(one.position_x), round(one.position_y)) for one in found]

    def _act(
        self, ahead: float = 0, aside: float = 0, turn: float = 0, fire: bool = False,
        use: bool = False, tics: int = _TICS,
    ) -> None:  # fmt: skip
        self.game.make_action([ahead, aside, turn, fire, use], tics)

    def _pose(self) -> Picture:
        names = ("POSITION_X", "POSITION_Y", "ANGLE")
        variable = self.api.GameVariable
        return np.array([self.game.get_game_variable(getattr(variable, n)) for n in names])

    def _room(self) -> list[float]:
        """Depth at eye level: on the left, ahead, on the right."""
        depth = self.game.get_state().depth_buffer
        rows = slice(int(depth.shape[0] * 0.45), int(depth.shape[0] * 0.55))
        return [float(part.mean()) for part in np.array_split(depth[rows, ::4], 3, axis=1)]

    def clip(
        self, rng: random.Random, name: str, starts: Sequence[tuple[int, int]], frames: Picture
    ) -> dict[str, Any] | None:
        """Fill `frames` and return the facts; None if it shows too little."""
        policy = rng.choices(list(_POLICIES), [share for share, _ in _POLICIES.values()])[0]
        side, speed = rng.choice((-1, 1)), rng.uniform(0.7, 2.6)
        monster = rng.choice(list(_MONSTERS))
        self._begin(name, rng.randrange(2**31))
        say = self.game.send_game_command
        for command in ("god",) if policy == "fight" else ("god", "notarget", "take weapons"):
            say(command)
        say("warp {} {}".format(*rng.choice(starts)))
        self._act(turn=rng.uniform(-180, 180), tics=12)
        views = [self._room()[1]]
        for _ in range(7):  # look around, and face where there is room
            self._act(turn=45, tics=1)
            views.append(self._room()[1])
        best = sorted(range(8), key=views.__getitem__)[-rng.randint(1, 2)]
        self._act(turn=45 * (best - 7), tics=1)
        if policy == "fight":
            weapon = rng.choice(("", "Shotgun", "Chaingun"))
            if weapon:
                for command in (f"give {weapon}", "give Shell", "give Clip", f"use {weapon}"):
                    say(command)
            self._act(tics=25)
            say(f"summon {monster}")
        if policy in ("walk", "strafe"):  # come up to speed
            self._drive(policy, side, speed, 0, None)
        room, poses, was = [], [], None
        for i in range(len(frames)):
            state = self.game.get_state()
            if state is None:  # the level or the episode ended
                return None
            frames[i] = self._picture(state.screen_buffer)
            room.append(self._room())
            poses.append(self._pose())
            stuck = was is not None and np.hypot(*(poses[-1] - was)[:2]) < 1
            if stuck and policy in ("walk", "strafe"):
                return None
            was = poses[-1]
            self._drive(policy, side, speed, i, room[-1])
        return self._facts(
            policy, _MONSTERS[monster], frames, np.array(poses), np.array(room), side
        )

    def _drive(
        self, policy: str, side: int, speed: float, step: int, room: list[float] | None
    ) -> None:
        left, ahead, right = room or (1, 1, 1)
        if policy == "walk":  # towards the deeper side
            steer = 9 * (right - left) / (left + right + 1) + 0.3 * side
            self._act(25, turn=max(-3, min(3, steer)), use=ahead < 12)
        elif policy == "turn":
            self._act(turn=side * speed)
        elif policy == "strafe":
            self._act(aside=side * 18)
        elif policy == "fight":
            self._act(turn=0.8 * side * np.sin(step / 4), fire=step % 12 < 6)
        else:
            self._act()

    def _picture(self, screen: Picture) -> Picture:
        assert self.bucket is not None
        height, width = self.bucket.height, self.bucket.width
        image = Image.fromarray(screen)
        scale = max(height / image.height, width / image.width)
        size = round(image.width * scale), round(image.height * scale)
        left, top = (size[0] - width) // 2, (size[1] - height) // 2
        image = image.resize(size, Image.Resampling.HAMMING)
        return np.asarray(image.crop((left, top, left + width, top + height)).point(_GAMMA))

    def _facts(
        self, policy: str, monster: str, frames: Picture, poses: Picture, room: Picture, side: int
    ) -> dict[str, Any] | None:
        seen, turns = frames[:, ::4, ::4].astype(np.float32), np.diff(poses[:, 2])
        depth = float(room[:, 1].mean())
        change = float(np.abs(np.diff(seen, axis=0)).mean())
        least = _LEAST[2] if policy == "stand" else _LEAST[3]
        dull = seen.mean() < _LEAST[0] or seen.std((1, 2, 3)).min() < _LEAST[1]
        if dull or change < least or depth < 5:  # so near is a wall alone
            return None
        rate = float(((turns + 180) % 360 - 180).mean())  # degrees a frame, to the left
        way = "left" if rate > 0 else "right"
        camera = {
            "walk": "moving ahead" if abs(rate) < 1 else f"moving {way}",
            "turn": f"turning {way} {'slowly' if abs(rate) < 3 else 'quickly'}",
            "strafe": f"moving {'right' if side > 0 else 'left'}",
        }.get(policy, "still")
        light, colour = look(frames)
        space = _SPACES[sum(depth > least for least in (20, 45))]
        return {
            "policy": policy, "monster": monster, "light": light, "colour": colour,
            "space": space, "camera": camera, "rate": rate, "change": change, "depth": depth,
        }  # fmt: skip
