"""diffusers' own tests, over models that are patched as they are built: `make test-diffusers`.

    python tests/diffusers_suites.py [--checkout DIFFUSERS] [--only wan vae] [--out FILE]

Each suite runs unpatched, with exact and with int8 attention. Whatever passes unpatched has to
pass patched. The outputs that diffusers' tests compare with come from unpatched models; for int8
the tolerance is that of int8. This file is also the pytest plugin that patches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pydoc import locate
from typing import Any
from unittest.mock import MagicMock

import diffusers  # first, or the checkout's own is found
import pytest

ROOT = Path(__file__).parents[1]
_MODELS, _VAES = "tests/models/transformers", "tests/models/autoencoders"
_PIPES = "tests/pipelines"
#: Name -> its files or folders in diffusers' checkout, each a few minutes on one core.
SUITES = {
    "wan": [f"{_MODELS}/test_models_transformer_{n}.py" for n in ("wan", "wan_vace")],
    "relatives": [
        f"{_MODELS}/test_models_transformer_{n}.py"
        for n in ("wan_animate", "skyreels_v2", "chronoedit", "anyflow", "anyflow_far")
    ],
    "cogvideox": [f"{_MODELS}/test_models_transformer_{n}.py" for n in ("cogvideox", "consisid")],
    "vae": [f"{_VAES}/test_models_autoencoder_{n}.py" for n in ("wan", "kl_cogvideox")],
    "pipelines-wan": [f"{_PIPES}/wan"],
    "pipelines-relatives": [f"{_PIPES}/{n}" for n in ("skyreels_v2", "chronoedit", "anyflow")],
    "pipelines-cogvideox": [f"{_PIPES}/{n}" for n in ("cogvideo", "consisid")],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "unpatched": {},
    "exact": {"attention": "exact"},
    "int8": {"attention": "int8", "fidelity": None},  # the guard would choose exact attention
}
#: Part of a test's name -> why no patch can pass it.
KNOWN: dict[str, str] = {}
#: Relative L2 of int8 q and k beside exact attention, as in tests/ops.
INT8_TOLERANCE = 0.015

# --- the plugin: a process for each suite and mode -----------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--patch", choices=OPTIONS, default="unpatched")
    parser.addoption("--outcomes", type=Path)


class Patches:
    """Patches every model of a known class that is built, and counts what ran."""

    def __init__(self, options: dict[str, Any], out: Path) -> None:
        self.options, self.out = options, out
        self.on = bool(options)
        self.reports: list[tuple[Any, Any]] = []
        self.ran: Counter[str] = Counter()
        self.outcomes: dict[str, str] = {}

    def patch(self, model: Any) -> None:
        from turbo_rcm_patch import is_patched, patch_model
        from turbo_rcm_patch.errors import TurboRCMError

        if not self.on or is_patched(model) or any(p.is_meta for p in model.parameters()):
            return
        try:
            self.reports.append((patch_model(model, **self.options), model))  # held to be asked
        except TurboRCMError as error:
            self.ran[f"not patched: {type(error).__name__}"] += 1

    def install(self) -> None:
        from diffusers.models.modeling_utils import ModelMixin

        from turbo_rcm_patch.patching.find import FAMILIES, VAES

        for name in (*FAMILIES, *VAES):
            cls: Any = locate(name)
            if name.startswith("diffusers."):
                cls.__init__ = self._after(cls.__init__, cls)
        loader: Any = ModelMixin.__dict__["from_pretrained"].__func__

        @wraps(loader)
        def from_pretrained(cls: Any, *args: Any, **named: Any) -> Any:
            loaded = loader(cls, *args, **named)
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            if f"{cls.__module__}.{cls.__qualname__}" in FAMILIES | VAES:
                self.patch(model)
            return loaded

        ModelMixin.from_pretrained = classmethod(from_pretrained)

    def _after(self, init: Callable[..., None], cls: type) -> Callable[..., None]:
        @wraps(init)
        def __init__(model: Any, *args: Any, **named: Any) -> None:
            init(model, *args, **named)
            if type(model) is cls:
                self.patch(model)

        return __init__

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Build the model of which the others have to give the output without a patch."""
        before = self.on
        self.on &= fixturedef.argname not in ("base_model_output", "base_pipe_output")
        try:
            return (yield)
        finally:
            self.on = before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
        for one, _ in self.reports if report.when == "teardown" else ():
            for words, count in one.last_forward.items():
                self.ran[words.partition(", convolutions")[0]] += count
        if report.when == "teardown":
            self.reports.clear()

    def pytest_sessionstart(self) -> None:
        if self.options.get("attention") == "int8":
            shared: Any = import_module("tests.testing_utils")  # diffusers'
            shared.assert_tensors_close = int8_close(shared.assert_tensors_close)

    def pytest_sessionfinish(self) -> None:
        self.out.write_text(json.dumps({"outcomes": self.outcomes, "ran": self.ran}))


def int8_close(close: Callable[..., None]) -> Callable[..., None]:
    """diffusers' comparison of two tensors, which int8 may fail by its own error."""

    @wraps(close)
    def assert_tensors_close(actual: Any, expected: Any, *args: Any, **named: Any) -> None:
        try:
            close(actual, expected, *args, **named)
        except AssertionError:
            far = (actual.double() - expected.double()).norm() / expected.double().norm()
            if actual.shape != expected.shape or not far < INT8_TOLERANCE:
                raise

    return assert_tensors_close


def pytest_configure(config: pytest.Config) -> None:
    out = config.getoption("--outcomes")
    if out is None:
        return
    mode = config.getoption("--patch")
    patches = Patches(OPTIONS[mode], out)
    if mode != "unpatched":
        patches.install()
    config.pluginmanager.register(patches)
    from_here()


def from_here() -> None:
    """Without a network, make what diffusers' pipelines download: a tiny T5 and its tokenizer."""
    for name in ("parameterized", "requests_mock"):  # of other models' tests, which are imported
        if find_spec(name) is None:
            sys.modules[name] = MagicMock()
    from transformers import AutoConfig, AutoTokenizer, ByT5Tokenizer, T5Config, T5EncoderModel

    def stand_in(cls: Any, make: Callable[[], Any]) -> None:
        load = cls.from_pretrained

        def from_pretrained(name: Any, *args: Any, **named: Any) -> Any:
            try:
                return load(name, *args, **named)
            except OSError:
                if name != "hf-internal-testing/tiny-random-t5":
                    raise
                return make()

        cls.from_pretrained = from_pretrained

    def config() -> T5Config:
        return T5Config(
            vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=5, num_heads=4,
            relative_attention_num_buckets=8, dropout_rate=0.1, initializer_factor=0.002,
        )  # fmt: skip

    stand_in(AutoConfig, config)
    stand_in(T5EncoderModel, lambda: T5EncoderModel(config()).eval())
    stand_in(AutoTokenizer, ByT5Tokenizer)


# --- the command ---------------------------------------------------------------------------------


def run(suite: str, mode: str, checkout: Path, folder: Path) -> dict[str, Any]:
    """Run a suite in a process of its own and return its outcomes."""
    out = folder / f"{suite}-{mode}.json"
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-rfE", "-p", "no:warnings"]
    command += ["-p", "no:cacheprovider", "-p", Path(__file__).stem]
    command += ["--patch", mode, "--outcomes", str(out), *SUITES[suite]]
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    done = subprocess.run(
        command, cwd=checkout, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    (folder / f"{suite}-{mode}.log").write_text(done.stdout)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{suite}, {mode}: pytest ended with {done.returncode}\n{done.stdout}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkout", type=Path, help="of diffusers; by default it is cloned")
    parser.add_argument("--only", nargs="*", choices=SUITES, default=[*SUITES])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "diffusers")
    parser.add_argument("--out", type=Path, help="where the table is added, as text")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    checkout = given.checkout or given.folder / "checkout"
    if given.checkout is None and not checkout.exists():
        tag = f"v{diffusers.__version__}"
        address = "https://github.com/huggingface/diffusers"
        clone = ["git", "clone", "-q", "--depth", "1", "--branch", tag, address, str(checkout)]
        subprocess.run(clone, check=True)
    table, faults = [], []
    for suite in given.only:
        before: dict[str, str] = {}
        for mode in OPTIONS:
            found = run(suite, mode, checkout, given.folder)
            outcomes = found["outcomes"]
            before = before or outcomes
            new = [t for t, one in outcomes.items() if one == "failed" != before.get(t)]
            faults += [f"{mode}: {test}" for test in new if not any(k in test for k in KNOWN)]
            if mode != "unpatched" and not {"fused", "channels-last"} & {
                words.split()[0].rstrip(",") for words in found["ran"]
            }:
                faults.append(f"{mode}: {suite} patched nothing")
            counts = Counter(outcomes.values())
            line = [f"{counts[k]} {k}" for k in ("passed", "failed", "skipped")]
            line += [f"{n} {words}" for words, n in sorted(found["ran"].items())]
            table.append(f"{suite:20} {mode:10} " + ", ".join(line))
            print(table[-1], flush=True)
    table += [f"fails only patched: {fault}" for fault in faults]
    print("\n".join(table[-len(faults) :] if faults else ["no test fails only patched"]))
    if given.out:
        given.out.write_text("\n".join(table) + "\n")
    return min(len(faults), 1)


if __name__ == "__main__":
    sys.exit(main())
