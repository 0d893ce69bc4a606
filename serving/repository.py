"""The models of one folder: which versions exist, which are loaded, and safe changes between them.

Layout: `ROOT/<name>/<version>/`, the same that NVIDIA Triton reads. A change is made only by an explicit
call. A version takes traffic after :meth:`ServedModel.load` has proved it; the swap is one assignment, so a
request sees the old version or the new one, and those already running keep the object they hold. A version
that fails its proof replaces nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serving.errors import Reason, ServingError, invalid
from serving.manifest import Manifest, ModelError
from serving.model import ServedModel

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
State = Literal["READY", "LOADING", "UNAVAILABLE"]


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One version as the repository index shows it; version "" stands for a model without any."""

    name: str
    version: str
    state: State
    reason: str


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The loaded versions of one model, newest load first; the first one is the default."""

    versions: tuple[ServedModel, ...]

    def get(self, version: str) -> ServedModel | None:
        return next((model for model in self.versions if model.version == version), None)


class Repository:
    """See the module's text. All methods may be called from any thread; loads wait for each other.

    Args:
        root: the models folder.
        load: makes a proven model from a version's folder, or raises ModelError.
        keep: versions of one model that stay loaded; beyond the default one they answer only by version.
        on_load, on_unload: told of every version that becomes loaded or stops being so.
    """

    def __init__(
        self,
        root: Path,
        load: Callable[[Path], ServedModel],
        keep: int = 1,
        on_load: Callable[[ServedModel], None] = lambda model: None,
        on_unload: Callable[[ServedModel], None] = lambda model: None,
    ) -> None:
        if not root.is_dir():
            raise ValueError(f"models: {root} is not a folder")
        if keep < 1:
            raise ValueError(f"keep_versions: must be at least 1, got {keep}")
        self.root = root
        self._load = load
        self._keep = keep
        self._on_load = on_load
        self._on_unload = on_unload
        self._loaded: dict[str, _Loaded] = {}  # replaced as a whole, never changed: readers take no lock
        self._states: dict[tuple[str, str], tuple[State, str]] = {}
        self._changing = threading.Lock()

    def names(self) -> list[str]:
        """Models that have at least one version on disk."""
        found = (entry for entry in self.root.iterdir() if NAME.fullmatch(entry.name) and entry.is_dir())
        return sorted(entry.name for entry in found if self.versions(entry.name))

    def versions(self, name: str) -> list[int]:
        """Versions of a model on disk, newest first. Folders that are not plain numbers are none."""
        folder = self.root / name
        if not NAME.fullmatch(name) or not folder.is_dir():
            return []
        numbers = (e.name for e in folder.iterdir() if re.fullmatch(r"[1-9][0-9]{0,17}", e.name) and e.is_dir())
        return sorted(map(int, numbers), reverse=True)

    def loaded(self) -> list[ServedModel]:
        """The default version of every loaded model, by name."""
        return [slot.versions[0] for _, slot in sorted(self._loaded.items())]

    def all_loaded(self) -> list[ServedModel]:
        """Every loaded version, by name, the default one first."""
        return [model for _, slot in sorted(self._loaded.items()) for model in slot.versions]

    def get(self, name: str, version: str = "") -> ServedModel:
        """The model to answer with; the default version where none is given.

        Raises:
            ServingError: `not_found`, `unavailable` (with the reason why it is not loaded) or `invalid`.
        """
        slot = self._loaded.get(name)
        if not version:
            if slot is not None:
                return slot.versions[0]
            reasons = [f"version {v}: {r[1]}" for (n, v), r in sorted(self._states.items()) if n == name]
            if reasons:
                raise ServingError(Reason.UNAVAILABLE, f"model {name!r} is not loaded; {'; '.join(reasons)}")
            known = ", ".join(sorted(self._loaded)) or "none"
            raise ServingError(Reason.NOT_FOUND, f"there is no model {name[:100]!r}; models: {known}")
        if not (version.isascii() and version.isdigit()):
            raise invalid(f"version: expected a number, got {version[:40]!r}")
        model = slot.get(version) if slot is not None else None
        if model is None:
            state = self._states.get((name, version))
            if state is not None:
                raise ServingError(Reason.UNAVAILABLE, f"version {version} of {name!r} is not loaded: {state[1]}")
            known = ", ".join(m.version for m in slot.versions) if slot is not None else "none"
            raise ServingError(Reason.NOT_FOUND, f"model {name[:100]!r} has no version {version}; loaded: {known}")
        return model

    def of_surface(self, surface: str) -> ServedModel:
        """The default version of the model called `surface`, or of the only one whose manifest names it."""
        if surface not in self._loaded:
            matches = [model for model in self.loaded() if model.manifest.surface == surface]
            if len(matches) == 1:
                return matches[0]
            if matches:
                names = ", ".join(model.name for model in matches)
                raise invalid(f"surface: {names} serve {surface!r}; name one of them in 'model'")
        return self.get(surface)

    def start(self) -> None:
        """Loads the newest good versions of every model, `keep` of each. Faults land in the index."""
        for name in self.names():
            with self._changing:
                good: list[ServedModel] = []
                for version in self.versions(name):
                    if len(good) < self._keep:
                        try:
                            good.append(self._prove(name, version))
                        except ModelError:
                            continue  # its state and reason are noted
                if good:
                    self._loaded = {**self._loaded, name: _Loaded(tuple(good))}
                    for model in good:
                        self._on_load(model)

    def load(self, name: str, version: int | None = None) -> ServedModel:
        """Makes a version the default: the newest on disk, or the one asked for (to roll back).

        Loading what is loaded already is cheap when its manifest has not changed.

        Raises:
            ServingError: `not_found`, or `model_refused` with the reason; what was loaded stays so.
        """
        with self._changing:
            on_disk = self.versions(name)
            if not on_disk or (version is not None and version not in on_disk):
                wanted = f"version {version} of {name[:100]!r}" if on_disk else f"model {name[:100]!r}"
                raise ServingError(Reason.NOT_FOUND, f"{wanted} is not in the models folder")
            chosen = on_disk[0] if version is None else version
            slot = self._loaded.get(name, _Loaded(()))
            before = slot.get(str(chosen))
            try:
                unchanged = before is not None and self._unchanged(before)
                model = before if before is not None and unchanged else self._prove(name, chosen)
            except ModelError as error:
                serving = f"; version {slot.versions[0].version} goes on serving" if slot.versions else ""
                raise ServingError(Reason.MODEL_REFUSED, f"{error}{serving}") from None
            others = tuple(other for other in slot.versions if other.version != model.version)
            kept, dropped = others[: self._keep - 1], others[self._keep - 1 :]
            self._loaded = {**self._loaded, name: _Loaded((model, *kept))}
            for old in dropped:
                self._states[name, old.version] = (
                    "UNAVAILABLE",
                    f"unloaded: version {model.version} took its place",
                )
                self._on_unload(old)
            if model is not before:
                self._on_load(model)
            return model

    def unload(self, name: str) -> None:
        """Stops serving all versions of a model. Raises ServingError `not_found` where none is loaded."""
        with self._changing:
            if name not in self._loaded:
                raise ServingError(Reason.NOT_FOUND, f"model {name[:100]!r} is not loaded")
            slot = self._loaded[name]
            self._loaded = {n: s for n, s in self._loaded.items() if n != name}
            for model in slot.versions:
                self._states[name, model.version] = ("UNAVAILABLE", "unloaded by request")
                self._on_unload(model)

    def index(self) -> list[IndexEntry]:
        """Every version on disk or loaded, with its state and, where it is not ready, the reason."""
        known = {(name, str(version)) for name in self.names() for version in self.versions(name)}
        known |= {(model.name, model.version) for model in self.all_loaded()}
        entries = []
        for name, version in sorted(known, key=lambda key: (key[0], int(key[1]))):
            slot = self._loaded.get(name)
            state, reason = self._states.get((name, version), ("UNAVAILABLE", "not loaded"))
            if slot is not None and slot.get(version) is not None:
                state = "READY"  # a refused reload of it leaves its reason here to be read
            entries.append(IndexEntry(name, version, state, reason))
        return entries

    def _prove(self, name: str, version: int) -> ServedModel:
        key = (name, str(version))
        self._states[key] = ("LOADING", "")
        try:
            model = self._load(self.root / name / str(version))
        except ModelError as error:
            self._states[key] = ("UNAVAILABLE", str(error))
            raise
        except OSError as error:
            self._states[key] = ("UNAVAILABLE", f"cannot be read: {error}")
            raise ModelError(f"{self.root / name / str(version)}: cannot be read: {error}") from None
        except BaseException:
            self._states[key] = ("UNAVAILABLE", "the load was interrupted or failed unexpectedly")
            raise
        self._states[key] = ("READY", "")
        return model

    def _unchanged(self, model: ServedModel) -> bool:
        try:
            return Manifest.read(self.root / model.name / model.version).sha256 == model.manifest.sha256
        except ModelError:
            return False  # the full proof says what is wrong
