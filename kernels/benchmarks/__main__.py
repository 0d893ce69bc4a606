"""Every table: ``python -m kernels.benchmarks``; some of them: ``python -m kernels.benchmarks gdpa norms``."""

from __future__ import annotations

import argparse

from kernels.benchmarks import block_attention, gdpa, host, interaction, jagged, jagged_attention, norms, token_mixing

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


def main() -> None:
    """Prints the tables that are asked for, in the order of ``TABLES`` if none is."""
    parser = argparse.ArgumentParser(prog="python -m kernels.benchmarks", description="Prints tables of speed on a GPU")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"some of {', '.join(TABLES)}; default all")
    names = parser.parse_args().tables or list(TABLES)
    if unknown := sorted(set(names) - set(TABLES)):
        parser.error(f"no tables {', '.join(unknown)}: there are {', '.join(TABLES)}")
    for name in names:
        print(f"## {name}\n", flush=True)
        TABLES[name]()
        print(flush=True)


if __name__ == "__main__":
    main()
