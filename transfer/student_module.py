"""The training of one student as a LightningModule: losses, optimizers, weight averaging, validation.

Shapes: N impressions, K tasks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from foundation.data.schema import Schema
from foundation.training.metrics import MetricSuite
from foundation.training.schedule import ScheduleConfig, rate_factor
from transfer.adapter import StudentAdapter
from transfer.batches import StudentBatch
from transfer.losses import DistillationHeads, DistillLossConfig, masked_bce, scaled_labels
from value_models.model import ValueModel

MONITOR = "validation/ne"


@dataclass(frozen=True, kw_only=True, slots=True)
class StudentOptimizerConfig:
    """How a student is trained.

    Attributes:
        lr: learning rate of everything but the tables.
        table_lr: learning rate of the tables.
        weight_decay: decoupled, on weights of two or more dimensions outside the tables.
        schedule: shape of both rates over the run.
        ema_decay: validation and the saved student use the average of the weights with this decay; 0 turns it off.
        clip_norm: gradients outside the tables are scaled down to this norm; 0 does not clip.
    """

    lr: float = 3e-3
    table_lr: float = 1e-2
    weight_decay: float = 0.0
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(warmup_share=0.05))
    ema_decay: float = 0.99
    clip_norm: float = 5.0

    def __post_init__(self) -> None:
        for key in ("lr", "table_lr", "weight_decay", "clip_norm"):
            if getattr(self, key) < 0:
                raise ValueError(f"optimizer.{key} must not be negative, got {getattr(self, key)}")
        if not 0.0 <= self.ema_decay < 1.0:
            raise ValueError(f"optimizer.ema_decay must be in [0, 1), got {self.ema_decay}")


class StudentModule(pl.LightningModule):
    """Trains a value model from labels and, on rows that a teacher scored, from the teacher.

    The model that serves reads labels through its own heads; the distillation heads and the adapter exist only
    here. Validation uses the averaged weights, and the weights of the best validation are kept.

    Args:
        model: the student, with shared tables filled in.
        schema: tasks with their weights, and surfaces.
        loss: weights of the losses.
        optimizer: rates.
        total_steps: steps of the schedule.
        metric_slice: the surface whose validation rows decide, or ``all``.
    """

    def __init__(
        self,
        model: ValueModel,
        schema: Schema,
        loss: DistillLossConfig,
        optimizer: StudentOptimizerConfig,
        total_steps: int,
        metric_slice: str,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # tables and the rest have an optimizer each
        self.model = model
        model.tables.sparse_gradients(True)
        self.schema = schema
        self.loss_config = loss
        self.config = optimizer
        self.total_steps = max(1, total_steps)
        self.metric_slice = metric_slice
        tasks = len(schema.task_names)
        self.distillation = DistillationHeads(model.feature_dim, tasks, loss.gradient_scale)
        self.adapter = StudentAdapter(tasks)
        self.average = copy.deepcopy(model).requires_grad_(False) if optimizer.ema_decay else None
        self.register_buffer("task_weight", torch.tensor([t.weight for t in schema.tasks], dtype=torch.float32))
        self.steps = 0
        self.best_ne = math.inf
        self.best_step = 0
        self._best: dict[str, Tensor] = {}
        self.curve: list[dict[str, float]] = []

    task_weight: Tensor

    @property
    def evaluated(self) -> ValueModel:
        """The model that is validated and saved: the average of the weights, if there is one."""
        return self.model if self.average is None else self.average

    def losses(self, batch: StudentBatch) -> dict[str, Tensor]:
        """The weighted parts of the loss by name, scalars; their sum is minimised. Source: see ``losses.py``."""
        config = self.loss_config
        features = self.model.features(batch.inputs)
        serving: Tensor = self.model.heads(features)
        parts = {"label": masked_bce(serving, batch.labels, batch.label_valid, batch.weight, self.task_weight)}
        scored = batch.teacher_found.unsqueeze(1).expand_as(batch.label_valid)
        if not bool(batch.teacher_found.any()):
            return parts
        teacher = torch.sigmoid(batch.teacher_logits)
        auxiliary, adapted = self.distillation(features)

        def follow(logits: Tensor, targets: Tensor) -> Tensor:
            return masked_bce(logits, targets, scored, batch.weight, self.task_weight)

        if config.auxiliary:
            parts["auxiliary"] = config.auxiliary * follow(auxiliary, scaled_labels(teacher, config.label_scale))
        if config.direct:
            parts["direct"] = config.direct * follow(serving, teacher)
        if config.adapter:
            fresh = scored & batch.label_valid
            parts["adapter_own"], targets = self.adapter.loss(
                batch.teacher_logits, batch.labels, fresh, batch.weight, self.task_weight
            )
            parts["adapter"] = config.adapter * follow(adapted, targets)
        return parts

    def training_step(self, batch: StudentBatch, batch_index: int) -> None:
        """One update of all weights, and of their average."""
        if self.steps == 0:
            self._start_heads(batch)
        parts = self.losses(batch)
        total = torch.stack(list(parts.values())).sum()
        optimizers = self._optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(total)
        if self.config.clip_norm:
            nn.utils.clip_grad_norm_(self._dense(), self.config.clip_norm)
        factor = rate_factor(self.config.schedule, self.steps, self.total_steps)
        for optimizer, rate in zip(optimizers, (self.config.lr, self.config.table_lr), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
        self.steps += 1
        self._update_average()
        self.log_dict({f"train/{name}": value.detach() for name, value in parts.items()}, batch_size=len(batch.weight))

    def on_validation_epoch_start(self) -> None:
        """Starts a validation with empty metrics."""
        self._suite = MetricSuite(self.schema.task_names, self.schema.surface_names)
        self.evaluated.eval()

    def validation_step(self, batch: StudentBatch, batch_index: int) -> None:
        """Adds a batch of predictions to the metrics."""
        logits = self.evaluated(batch.inputs)
        if not bool(torch.isfinite(logits).all()):
            raise ValueError(
                f"after {self.steps} steps the student's logits are not finite; lower optimizer.lr or "
                "optimizer.table_lr, or set optimizer.clip_norm"
            )
        self._suite.update(logits, batch.labels, batch.label_valid, batch.weight, batch.surface, batch.user_id)

    def on_validation_epoch_end(self) -> None:
        """Logs the normalised entropy and keeps the weights if it is the best so far."""
        results = self._suite.compute()
        slices = {task.name: results[task.name][self.metric_slice] for task in self.schema.tasks}
        values = {name: slice_["ne"] for name, slice_ in slices.items()}
        ne = joint_ne(slices, {task.name: task.weight for task in self.schema.tasks})
        self.log_dict({MONITOR: ne, **{f"validation/ne/{name}": value for name, value in values.items()}})
        self.curve.append({"step": self.steps, "ne": ne, **{f"ne/{name}": v for name, v in values.items()}})
        if ne < self.best_ne or not self._best:
            self.best_ne, self.best_step = ne, self.steps
            self._best = {name: value.detach().clone() for name, value in self.evaluated.state_dict().items()}
        self.model.train()

    def best_model(self) -> ValueModel:
        """The student with the weights of its best validation, in evaluation mode."""
        assert self._best, "no validation has run"
        self.model.load_state_dict(self._best)
        self.model.tables.sparse_gradients(False)
        return self.model.eval()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """AdamW for everything but the tables; for those that are tuned, Adam that touches only rows in the batch."""
        decayed = [p for p in self._dense() if p.ndim >= 2]
        others = [p for p in self._dense() if p.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": self.config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=self.config.lr)]
        tables = [p for p in self.model.tables.parameters() if p.requires_grad]
        return optimizers + ([torch.optim.SparseAdam(tables, lr=self.config.table_lr)] if tables else [])

    @torch.no_grad()
    def _start_heads(self, batch: StudentBatch) -> None:
        """Sets every head's bias to the base rate of the first batch; the first steps then go to what differs."""
        valid = batch.label_valid
        positives = torch.where(valid, batch.labels, 0.0).sum(0)
        logit = torch.logit((positives + 1) / (valid.sum(0) + 2))
        models = (self.model, self.evaluated)
        for head in (*(m.heads for m in models), self.distillation.auxiliary, self.distillation.adapted):
            head.bias.copy_(logit)

    def _dense(self) -> list[nn.Parameter]:
        tables = {id(p) for p in self.model.tables.parameters()}
        owners = (self.model, self.distillation, self.adapter)
        return [p for owner in owners for p in owner.parameters() if id(p) not in tables]

    def _optimizers(self) -> list[Any]:
        found = self.optimizers()
        return list(found) if isinstance(found, list) else [found]

    @torch.no_grad()
    def _update_average(self) -> None:
        if self.average is None:
            return
        # Early averages would otherwise hold on to the initial weights.
        decay = min(self.config.ema_decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1.0 - decay)


def joint_ne(slices: Mapping[str, Mapping[str, Any]], weights: Mapping[str, float]) -> float:
    """Log loss of all tasks together over their entropy together: tasks count by how much there is to predict.

    A plain mean over tasks would let a task with a handful of positives decide which weights are kept.

    Args:
        slices: by task, ``ne``, ``rows`` and ``positives``; a task of one class has no NE and is left out.
        weights: weight of each task.

    Raises:
        ValueError: no task has both classes.
    """
    total = entropy = 0.0
    for name, slice_ in slices.items():
        if not math.isfinite(slice_["ne"]):
            continue
        p = slice_["positives"] / slice_["rows"]
        own = -weights[name] * slice_["rows"] * (p * math.log(p) + (1 - p) * math.log1p(-p))
        total, entropy = total + slice_["ne"] * own, entropy + own
    if entropy <= 0:
        raise ValueError(
            "no task has both classes among the surface's validation rows, so nothing can be compared; "
            "use a longer validation period or another surface"
        )
    return total / entropy
