"""What TorchRec's fully sharded 2D tables compute, beside plain 2D tables in one process. CUDA only.

    torchrun --nproc_per_node 4 -m foundation.parallel.benchmarks.fully_sharded

`ShardingStrategy.FULLY_SHARDED` keeps a part of a replica's rows alone between forward and backward pass, and averages
replicas on the way there. Trained are two table groups on the batches of `equality`: as TorchRec does it, and with rows
and AdaGrad's sums averaged after every step too, as without the strategy. Printed are the largest differences of
losses, rows and sums to one process that simulates the groups, and of rows between the groups.
"""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardingEnv2D, ShardingStrategy

from foundation.data.batch import Batch
from foundation.parallel import parallelize as spreading
from foundation.parallel.benchmarks import equality
from foundation.parallel.benchmarks.random_batches import dealt, random_batch, take
from foundation.parallel.benchmarks.steps import mean_loss, train_step
from foundation.parallel.join import join_ranks
from foundation.parallel.tables import table_momentum, table_weights
from foundation.parallel.topology import ParallelConfig, SparseSizes

STEPS = 6


class _FullySharded(ShardingEnv2D):
    """The environment of 2D tables with the strategy set."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, sharding_strategy=ShardingStrategy.FULLY_SHARDED)


CASES: dict[str, dict[str, bool]] = {
    "as it is": {"averaged": False},
    "averaged after steps": {"averaged": True},
    "averaged, evaluated before the last step": {"averaged": True, "evaluate": True},
}
"""Ways by name; the last may end the process with an error of CUDA."""


def compare(device: torch.device, *, averaged: bool, steps: int = STEPS, evaluate: bool = False) -> dict[str, Any]:
    """Trains with TorchRec's strategy and compares; a collective call.

    Args:
        device: CUDA.
        averaged: average rows and sums after every step too.
        steps: of training.
        evaluate: do a forward pass without a backward pass before the last step, as an evaluation does.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    case = equality.Case(parallel=ParallelConfig(sparse=SparseSizes(replicas=2)), plan="row-wise")
    with mock.patch.object(spreading, "ShardingEnv2D", _FullySharded):
        state = equality._spread(case, device)
    replicas = state.model.replicas
    assert replicas is not None
    if not averaged:
        state.model.replicas = None
    batches = [random_batch(equality.SIZES, seed) for seed in range(steps)]
    losses = []
    for number, encoded in enumerate(batches):
        mine = take(encoded, dealt(len(encoded.request_time), world)[rank])
        batch = Batch.from_encoded(mine, equality.SIZES.schema(), device)
        if evaluate and number == steps - 1:
            with torch.no_grad():
                state.model(batch)
        losses.append(mean_loss(train_step(state, batch)))
        assert state.ema is not None
        state.ema.update(number + 1)
    expected = equality._alone(case, batches, state.model, device, {})
    rows, between, sums = 0.0, 0.0, 0.0
    group = state.model._env.replica_pg
    for name, table in table_weights(state.model).items():
        rows = max(rows, equality._difference(table, expected.weights[name]))
        for piece in table.pieces:
            mean = piece.tensor.clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
            between = max(between, 2.0 * float((piece.tensor - mean).abs().max()))  # of two groups
    for name, momentum in table_momentum(state.model).items():
        sums = max(sums, equality._difference(momentum, expected.momentum[name]))
    worst = torch.tensor([rows, between, sums], device=device, dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    rows, between, sums = worst.tolist()
    return {
        "losses": [abs(a - b) for a, b in zip(losses, expected.losses, strict=True)],
        "rows": rows,
        "between groups": between,
        "sums": sums,
    }


def main() -> None:
    """Prints a line for each way."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    join_ranks("nccl")
    for name, options in CASES.items():
        found = compare(device, **options)
        if dist.get_rank() == 0:
            print(json.dumps({"fully sharded": name, **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
