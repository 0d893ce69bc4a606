"""Random number generators of this process: seeded, saved as plain values, put back bit for bit."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seeds Python, numpy and torch on every device of this process."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The state of all generators that training may draw from, as plain values for JSON."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(words), gauss],
        "numpy": [_text(np.asarray(keys).tobytes()), int(position), int(has_gauss), float(cached)],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device).numpy().tobytes())
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Puts back what `rng_state` returned; a state without this device's generator leaves that one alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = state["numpy"]
    words_u32 = np.frombuffer(base64.b64decode(keys), dtype=np.uint32)
    np.random.set_state(("MT19937", words_u32, position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)


@contextmanager
def untouched_rng(device: torch.device) -> Iterator[None]:
    """Whatever the block draws, training goes on as if it had not run."""
    state = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
