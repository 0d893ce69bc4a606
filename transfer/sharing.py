"""Parameter sharing: the tables that a student takes from the teacher, declared, checked and reported.

A table is copied, or projected to the student's smaller dim so that as much of it is kept as any projection can
keep (singular value decomposition), and then frozen or tuned.

Shapes: rows of a table, D teacher dim, d student dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from value_models.fields import Tables


class SharingError(ValueError):
    """The teacher's tables do not meet the contract; the message names the table and the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSharing:
    """How a student takes one table.

    Attributes:
        how: ``copy`` (equal dims) or ``project`` (to the student's dim, not larger than the teacher's).
        tune: whether training goes on changing it; otherwise it is frozen.
        rows: rows that the teacher's table must have; None does not check. The student's own always must agree.
        dim: dim that the teacher's table must have; None does not check.
        sha256: hash that the teacher's table must have, from the report of an earlier run; None does not check.
    """

    how: Literal["copy", "project"] = "copy"
    tune: bool = True
    rows: int | None = None
    dim: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingConfig:
    """The contract: what is taken, by table name."""

    tables: dict[str, TableSharing] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tables:
            raise ValueError("sharing.tables is empty; name at least one table, or leave sharing out")


def teacher_tables(model: nn.Module) -> dict[str, Tensor]:
    """The embedding tables of an unsharded teacher by name, float ``[rows, D]``.

    Raises:
        SharingError: two modules hold a table of one name.
    """
    found: dict[str, Tensor] = {}
    for module in model.modules():
        if isinstance(module, EmbeddingCollection):
            tables = module.embeddings
        elif isinstance(module, EmbeddingBagCollection):
            tables = module.embedding_bags
        else:
            continue
        for name, table in tables.items():
            if name in found:
                raise SharingError(f"sharing.tables.{name}: the teacher holds two tables of this name")
            found[name] = table.weight.detach()
    return found


def share_tables(config: SharingConfig, teacher: Mapping[str, Tensor], student: Tables) -> dict[str, dict[str, Any]]:
    """Fills the student's tables from the teacher's, and freezes those that are not tuned.

    Args:
        config: the contract.
        teacher: weights by table name, from :func:`teacher_tables`.
        student: the student's tables.

    Returns:
        By table: ``how``, ``tune``, ``rows``, ``teacher_dim``, ``dim``, ``kept`` (share of the squared norm that
        survives the projection) and ``sha256`` of the teacher's table.

    Raises:
        SharingError: a table is missing on either side, or rows, dims or the hash do not agree. The student is
            unchanged then.
    """
    own = {name.removesuffix("_"): student.weight(name.removesuffix("_")) for name in student.embeddings}
    for name, want in config.tables.items():
        _check(name, want, teacher, own)
    report: dict[str, dict[str, Any]] = {}
    for name, want in config.tables.items():
        source, target = teacher[name].float(), own[name]
        kept = 1.0
        if want.how == "project":
            source, kept = project(source, target.shape[1])
        with torch.no_grad():
            target.copy_(source)
        target.requires_grad_(want.tune)
        report[name] = {
            "how": want.how,
            "tune": want.tune,
            "rows": target.shape[0],
            "teacher_dim": teacher[name].shape[1],
            "dim": target.shape[1],
            "kept": kept,
            "sha256": table_hash(teacher[name]),
        }
    return report


def _check(name: str, want: TableSharing, teacher: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    key = f"sharing.tables.{name}"
    for side, tables in (("teacher", teacher), ("student", own)):
        if name not in tables:
            raise SharingError(f"{key}: the {side} has no such table; it has {', '.join(sorted(tables)) or 'none'}")
    rows, dim = teacher[name].shape
    own_rows, own_dim = own[name].shape
    if want.rows is not None and want.rows != rows:
        raise SharingError(f"{key}.rows: the contract says {want.rows}, the teacher's table has {rows}")
    if want.dim is not None and want.dim != dim:
        raise SharingError(f"{key}.dim: the contract says {want.dim}, the teacher's table has {dim}")
    if rows != own_rows:
        raise SharingError(
            f"{key}: the teacher's table has {rows} rows, the student's {own_rows}; ids would be mixed up"
        )
    if want.how == "copy" and dim != own_dim:
        raise SharingError(f"{key}.how: copy needs equal dims, teacher {dim} and student {own_dim}; use project")
    if want.how == "project" and dim < own_dim:
        raise SharingError(f"{key}.how: project goes to a smaller dim, teacher {dim} and student {own_dim}")
    if want.sha256 is not None and want.sha256 != table_hash(teacher[name]):
        raise SharingError(
            f"{key}.sha256: the contract says {want.sha256[:12]}..., the teacher's table has "
            f"{table_hash(teacher[name])[:12]}...; it is another teacher"
        )


def project(table: Tensor, dim: int) -> tuple[Tensor, float]:
    """The best ``dim``-wide image of a table ``[rows, D]``: its coordinates on the leading right singular vectors.

    No other linear map to ``dim`` and back leaves a smaller squared error (Eckart and Young, 1936). Computed from
    the D x D Gram matrix, so rows may be many.

    Returns:
        float32 ``[rows, dim]``, and the share of the squared norm that it keeps.
    """
    values, vectors = torch.linalg.eigh(_gram(table))  # ascending
    leading = vectors[:, -dim:].flip(1)
    # A singular vector's sign is arbitrary; this makes the result the same everywhere.
    largest = leading.gather(0, leading.abs().argmax(0, keepdim=True))
    leading = leading * torch.where(largest < 0, -1.0, 1.0)
    total = float(values.clamp(min=0).sum())
    kept = float(values[-dim:].clamp(min=0).sum()) / total if total > 0 else 1.0
    return table.float() @ leading.float(), kept


def _gram(table: Tensor, rows: int = 1 << 18) -> Tensor:
    """``table^T table`` in float64, a block of rows at a time."""
    gram = torch.zeros(table.shape[1], table.shape[1], dtype=torch.float64)
    for block in table.split(rows):
        wide = block.double()
        gram += wide.T @ wide
    return gram


def table_hash(table: Tensor) -> str:
    """sha256 of a table's float32 values, row by row."""
    digest = hashlib.sha256()
    for block in table.detach().cpu().float().split(1 << 18):
        digest.update(block.contiguous().numpy().tobytes())
    return digest.hexdigest()
