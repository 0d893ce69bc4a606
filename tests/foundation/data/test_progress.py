"""Progress bars pass items through and stay silent when nobody watches."""

from __future__ import annotations

import pytest

from foundation.data.progress import progress, track


def test_track_yields_everything_silently(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track([1, 2, 3], "counting")) == [1, 2, 3]
    assert list(track(iter("ab"), "unknown length")) == ["a", "b"]
    with progress("manual", 10) as advance:
        advance(4)
        advance(6, description="done")
    assert capsys.readouterr() == ("", "")


def test_bar_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(track([1, 2, 3], "counting")) == [1, 2, 3]
    assert "counting" in capsys.readouterr().err


def test_track_stops_with_its_consumer() -> None:
    items = track(range(100), "counting")
    assert next(items) == 0
    items.close()
