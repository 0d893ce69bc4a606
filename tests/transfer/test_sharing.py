from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from transfer.sharing import (
    SharingConfig,
    SharingError,
    TableSharing,
    project,
    share_tables,
    table_hash,
    teacher_tables,
)
from value_models.fields import Tables


def student(user: int = 8, item: int = 3) -> Tables:
    return Tables({"user": user, "item": item}, {"user": 20, "item": 50})


def teacher() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "user": torch.randn(20, 8, generator=generator),
        "item": torch.randn(50, 6, generator=generator) * torch.tensor([5.0, 3.0, 2.0, 0.5, 0.2, 0.1]),
    }


def contract(**tables: TableSharing) -> SharingConfig:
    return SharingConfig(tables=tables)


def test_copies_projects_freezes_and_reports() -> None:
    tables, source = student(), teacher()
    report = share_tables(contract(user=TableSharing(tune=False), item=TableSharing(how="project")), source, tables)
    torch.testing.assert_close(tables.weight("user").detach(), source["user"])
    assert not tables.weight("user").requires_grad and tables.weight("item").requires_grad
    assert report["user"]["kept"] == 1.0 and report["user"]["sha256"] == table_hash(source["user"])
    shape = {key: report["item"][key] for key in ("how", "tune", "rows", "teacher_dim", "dim")}
    assert shape == {"how": "project", "tune": True, "rows": 50, "teacher_dim": 6, "dim": 3}
    assert 0.9 < report["item"]["kept"] < 1.0


@pytest.mark.parametrize("dim", [1, 3, 5, 6])
def test_projection_is_optimal(dim: int) -> None:
    table = teacher()["item"]
    image, kept = project(table, dim)
    u, s, vt = np.linalg.svd(table.double().numpy(), full_matrices=False)
    best = (u[:, :dim] * s[:dim]) @ vt[:dim]
    smallest = np.linalg.norm(table.numpy() - best)
    # What the best linear map back from the image leaves over.
    back = torch.linalg.lstsq(image.double(), table.double()).solution
    error = float(torch.linalg.norm(table.double() - image.double() @ back))
    assert error == pytest.approx(smallest, abs=1e-4)
    assert kept == pytest.approx(float((s[:dim] ** 2).sum() / (s**2).sum()), abs=1e-6)


def test_projection_keeps_lengths_and_signs_are_fixed() -> None:
    table = teacher()["item"]
    image, _ = project(table, 6)
    torch.testing.assert_close(image @ image.T, table @ table.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(project(table.clone(), 3)[0], image[:, :3])


def test_projection_of_zeros() -> None:
    image, kept = project(torch.zeros(5, 4), 2)
    assert not image.any() and kept == 1.0


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"nope": TableSharing()}, r"sharing\.tables\.nope: the teacher has no such table; it has item, user"),
        ({"item": TableSharing()}, r"item\.how: copy needs equal dims, teacher 6 and student 3; use project"),
        ({"user": TableSharing(rows=21)}, r"user\.rows: the contract says 21, the teacher's table has 20"),
        ({"user": TableSharing(dim=9)}, r"user\.dim"),
        ({"user": TableSharing(sha256="0" * 64)}, r"user\.sha256.*another teacher"),
    ],
)
def test_a_broken_contract_changes_nothing(tables: dict[str, TableSharing], message: str) -> None:
    ours = student()
    before = ours.weight("user").detach().clone()
    with pytest.raises(SharingError, match=message):
        share_tables(SharingConfig(tables={"user": TableSharing(), **tables}), teacher(), ours)
    torch.testing.assert_close(ours.weight("user").detach(), before)


def test_rows_and_sides_must_agree() -> None:
    with pytest.raises(SharingError, match="20 rows, the student's 50"):
        share_tables(contract(item=TableSharing()), {"item": torch.zeros(20, 3)}, student())
    with pytest.raises(SharingError, match=r"extra: the student has no such table"):
        share_tables(contract(extra=TableSharing()), {"extra": torch.zeros(2, 2)}, student())
    with pytest.raises(SharingError, match=r"item\.how: project goes to a smaller dim"):
        share_tables(contract(item=TableSharing(how="project")), {"item": torch.zeros(50, 2)}, student())
    with pytest.raises(ValueError, match=r"sharing\.tables is empty"):
        SharingConfig()


def test_finds_torchrec_tables() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = EmbeddingConfig(num_embeddings=4, embedding_dim=8, name="user", feature_names=["u"])
            bag = EmbeddingBagConfig(num_embeddings=5, embedding_dim=4, name="topic", feature_names=["t"])
            self.one = EmbeddingCollection(tables=[config])
            self.two = EmbeddingBagCollection(tables=[bag])

    model = Model()
    found = teacher_tables(model)
    assert {name: tuple(t.shape) for name, t in found.items()} == {"user": (4, 8), "topic": (5, 4)}
    torch.testing.assert_close(found["user"], model.one.embeddings["user"].weight.detach())


def test_a_name_that_a_module_dict_refuses() -> None:
    tables = Tables({"type": 2}, {"type": 3})
    share_tables(contract(type=TableSharing()), {"type": torch.ones(3, 2)}, tables)
    assert (tables.weight("type") == 1).all()
