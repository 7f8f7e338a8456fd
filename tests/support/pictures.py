"""Plots, as files."""

from __future__ import annotations

from pathlib import Path


def assert_is_png(path: Path) -> None:
    """A picture, and not an empty one."""
    from matplotlib import image

    pixels = image.imread(path)
    assert pixels.shape[0] >= 300
    assert pixels.shape[1] >= 800
    # Axes and text are dark, curves are coloured.
    dark = (pixels[:, :, :3].max(axis=2) < 0.4).mean()
    coloured = (pixels[:, :, :3].max(axis=2) - pixels[:, :, :3].min(axis=2) > 0.3).mean()
    assert 0.001 < dark < 0.3
    assert coloured > 0.0005
