"""Versions come and go without a request ever seeing a bad one."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from serving.errors import Reason, ServingError
from serving.model import ModelLimits, ServedModel
from serving.repository import Repository
from tests.serving.model_folder import write_model


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    for version in (1, 2, 3):
        write_model(root, version=version, seed=version)
    write_model(root, name="reels", seed=9)
    return root


@pytest.fixture
def root(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals, tmp_path / "models"))


def make(root: Path, keep: int = 1) -> Repository:
    limits = ModelLimits(max_candidates=8)
    return Repository(root, lambda folder: ServedModel.load(folder, limits), keep)


def damage(folder: Path) -> None:
    content = bytearray((folder / "model.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "model.onnx").write_bytes(bytes(content))


def states(repository: Repository, name: str = "feed") -> dict[str, str]:
    return {e.version: f"{e.state} {e.reason}".strip() for e in repository.index() if e.name == name}


def refused(repository: Repository, name: str, version: int | None = None) -> str:
    with pytest.raises(ServingError) as caught:
        repository.load(name, version)
    assert caught.value.reason is Reason.MODEL_REFUSED
    return str(caught.value)


def test_start_loads_the_newest_version_of_each_model(root: Path) -> None:
    repository = make(root)
    repository.start()
    assert [(m.name, m.version) for m in repository.all_loaded()] == [("feed", "3"), ("reels", "1")]
    assert states(repository) == {
        "1": "UNAVAILABLE not loaded",
        "2": "UNAVAILABLE not loaded",
        "3": "READY",
    }


def test_start_falls_back_to_an_older_version_and_says_why(root: Path) -> None:
    damage(root / "feed" / "3")
    repository = make(root)
    repository.start()
    assert repository.get("feed").version == "2"
    assert "model.onnx: sha256 is" in states(repository)["3"]


def test_start_with_nothing_good_leaves_the_model_unavailable(root: Path) -> None:
    for version in (1, 2, 3):
        damage(root / "feed" / str(version))
    repository = make(root)
    repository.start()
    with pytest.raises(ServingError, match=r"model 'feed' is not loaded; version 1: .*sha256") as caught:
        repository.get("feed")
    assert caught.value.reason is Reason.UNAVAILABLE
    assert repository.get("reels").version == "1"


def test_older_versions_answer_by_number_while_they_are_kept(root: Path) -> None:
    repository = make(root, keep=2)
    repository.start()
    assert repository.get("feed").version == "3" and repository.get("feed", "2").version == "2"
    with pytest.raises(ServingError, match="has no version 1; loaded: 3, 2") as caught:
        repository.get("feed", "1")
    assert caught.value.reason is Reason.NOT_FOUND


def test_a_load_swaps_and_the_old_object_still_works(root: Path) -> None:
    shutil.move(root / "feed" / "3", root / "aside")
    repository = make(root)
    repository.start()
    old = repository.get("feed")
    shutil.move(root / "aside", root / "feed" / "3")
    assert repository.load("feed").version == "3" and repository.get("feed").version == "3"
    assert states(repository)["2"] == "UNAVAILABLE unloaded: version 3 took its place"
    with pytest.raises(ServingError, match="version 2 of 'feed' is not loaded: unloaded") as caught:
        repository.get("feed", "2")
    assert caught.value.reason is Reason.UNAVAILABLE
    assert old.run(old.manifest.golden_inputs)["click"].shape == (6,)


@pytest.mark.parametrize("file", ["model.onnx", "manifest.json", "encoder.npz", "schema.yaml"])
def test_a_bad_version_never_replaces_a_good_one(root: Path, file: str) -> None:
    shutil.move(root / "feed" / "3", root / "aside")
    repository = make(root)
    repository.start()
    shutil.move(root / "aside", root / "feed" / "3")
    (root / "feed" / "3" / file).write_bytes((root / "feed" / "3" / file).read_bytes()[:-20])
    message = refused(repository, "feed")
    assert file in message and "version 2 goes on serving" in message
    assert repository.get("feed").version == "2"
    assert states(repository)["2"] == "READY" and file in states(repository)["3"]


def test_rolling_back_names_the_version(root: Path) -> None:
    repository = make(root)
    repository.start()
    assert repository.load("feed", 1).version == "1" and repository.get("feed").version == "1"
    assert repository.load("feed").version == "3"


def test_loading_again_is_free_until_the_manifest_changes(root: Path) -> None:
    repository = make(root)
    repository.start()
    before = repository.get("feed")
    assert repository.load("feed") is before
    manifest = root / "feed" / "3" / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    assert repository.load("feed") is not before


def test_a_refused_reload_of_the_serving_version_leaves_its_reason(root: Path) -> None:
    repository = make(root)
    repository.start()
    (root / "feed" / "3" / "manifest.json").write_text("{")
    assert "not JSON" in refused(repository, "feed")
    assert repository.get("feed").version == "3"
    assert states(repository)["3"].startswith("READY") and "not JSON" in states(repository)["3"]


def test_unload(root: Path) -> None:
    repository = make(root)
    repository.start()
    repository.unload("feed")
    with pytest.raises(ServingError, match="version 3: unloaded by request"):
        repository.get("feed")
    with pytest.raises(ServingError, match="'feed' is not loaded"):
        repository.unload("feed")
    assert repository.load("feed").version == "3"


@pytest.mark.parametrize("name", ["nope", "..", "../feed", "feed/3", "", ".hidden", "feed\0", "a" * 5000])
def test_unknown_and_odd_names_are_not_found(root: Path, name: str) -> None:
    repository = make(root)
    repository.start()
    for call in (repository.get, repository.load, repository.unload):
        with pytest.raises(ServingError) as caught:
            call(name)
        assert caught.value.reason is Reason.NOT_FOUND and len(str(caught.value)) < 300


@pytest.mark.parametrize("version", ["x", "-1", "1.0", "٣", "1 "])
def test_a_version_is_a_number(root: Path, version: str) -> None:
    repository = make(root)
    repository.start()
    with pytest.raises(ServingError, match="version: expected a number"):
        repository.get("feed", version)


def test_folders_that_are_no_versions_are_ignored(root: Path) -> None:
    for name in ("4.tmp-77", "latest", "04", "-1"):
        (root / "feed" / name).mkdir()
    (root / "notes.txt").write_text("x")
    (root / ".hidden" / "1").mkdir(parents=True)
    repository = make(root)
    assert repository.versions("feed") == [3, 2, 1] and repository.names() == ["feed", "reels"]


def test_surface_finds_a_model_of_another_name(root: Path) -> None:
    write_model(root, name="shop_small", surface="shop")
    repository = make(root)
    repository.start()
    assert repository.of_surface("reels").name == "reels"
    assert repository.of_surface("shop").name == "shop_small"
    write_model(root, name="shop_large", surface="shop")
    repository.load("shop_large")
    with pytest.raises(ServingError, match="shop_large, shop_small serve 'shop'; name one of them in 'model'"):
        repository.of_surface("shop")
    with pytest.raises(ServingError, match="there is no model 'stories'; models: feed, reels, shop_large, shop_small"):
        repository.of_surface("stories")


def test_readers_see_one_version_or_the_other_during_many_swaps(root: Path) -> None:
    repository = make(root, keep=1)
    repository.start()
    stop = threading.Event()
    seen: set[str] = set()
    faults: list[BaseException] = []

    def read() -> None:
        while not stop.is_set():
            try:
                model = repository.get("feed")
                seen.add(model.version)
                model.run(model.manifest.golden_inputs)
            except BaseException as error:
                faults.append(error)
                return

    reader = threading.Thread(target=read)
    reader.start()
    for version in (1, 2, 3, 1, 2, 3):
        repository.load("feed", version)
    stop.set()
    reader.join()
    assert not faults and seen <= {"1", "2", "3"} and len(seen) > 1


def test_the_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"models: .*nothing is not a folder"):
        make(tmp_path / "nothing")
