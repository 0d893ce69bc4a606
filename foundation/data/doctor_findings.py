"""What the doctor reports: findings, each with its file, column, number of rows and severity."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault or fact.

    Args:
        check: short name of what was checked, such as `future_history`.
        severity: `error` must be mended, `warning` is likely a mistake, `info` is worth knowing.
        message: what is wrong and what to do.
        file: the file, relative to the dataset; null when it is about all of it.
        column: the column; null when it is about none.
        rows: number of rows (or values, where the message says so); null when it does not apply.
    """

    check: str
    severity: Severity
    message: str
    file: str | None = None
    column: str | None = None
    rows: int | None = None


class Findings:
    """Collects findings; counts of the same check, file, column and detail add up, the first message stays."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str | None, str | None, str], Finding] = {}

    def add(
        self,
        check: str,
        severity: Severity,
        message: str,
        *,
        file: str | None = None,
        column: str | None = None,
        rows: int | None = None,
        detail: str = "",
    ) -> None:
        """Adds a finding. Give the parts of a count as they come; with ``rows=0`` nothing is added.

        ``detail`` keeps findings apart that agree in check, file and column, such as those of two surfaces.
        """
        if rows == 0:
            return
        key = (check, severity, file, column, detail)
        before = self._found.get(key)
        if before is None:
            self._found[key] = Finding(
                check=check, severity=severity, message=message, file=file, column=column, rows=rows
            )
        elif rows is not None:
            self._found[key] = replace(before, rows=(before.rows or 0) + rows)

    def sorted(self) -> tuple[Finding, ...]:
        """All findings, the worst first, else in the order in which they were found."""
        return tuple(sorted(self._found.values(), key=lambda f: SEVERITIES.index(f.severity)))

    def has(self, severity: Severity) -> bool:
        """Whether there is a finding of this severity."""
        return any(f.severity == severity for f in self._found.values())
