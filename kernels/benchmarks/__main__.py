"""Every table: ``python -m kernels.benchmarks``; some of them: ``python -m kernels.benchmarks gdpa norms``."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.benchmarks import (
    block_attention,
    command,
    gdpa,
    host,
    interaction,
    jagged,
    jagged_attention,
    norms,
    token_mixing,
)

TABLES = {
    "gdpa": gdpa.main,
    "jagged_attention": jagged_attention.main,
    "block_attention": block_attention.main,
    "jagged": jagged.main,
    "norms": norms.main,
    "interaction": interaction.main,
    "token_mixing": token_mixing.main,
    "host": host.main,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables that are asked for, in the order of ``TABLES`` if none is."""
    parser = command.parser("", "Prints tables of speed on a GPU")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"some of {', '.join(TABLES)}; default all")
    names = parser.parse_args(arguments).tables or list(TABLES)
    command.require_known(parser, names, TABLES)
    command.require_gpu(parser)
    for name in names:
        print(f"## {name}\n", flush=True)
        TABLES[name]()
        print(flush=True)


if __name__ == "__main__":
    main()
