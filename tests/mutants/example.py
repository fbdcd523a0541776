"""Tests for tests/test_mutants.py: one fails on every machine, one notices a change."""

from __future__ import annotations

from turbo_rcm_patch.video import verdict


def test_of_another_machine() -> None:
    raise AssertionError


def test_of_the_name() -> None:
    assert verdict.__name__ == "turbo_rcm_patch.video.verdict"


def test_of_the_change() -> None:
    assert not hasattr(verdict, "broken")
