"""`megatron-acco SUBCOMMAND`: tools around a training run. Each subcommand is a module of this package."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence

from megatron_acco.cli import (
    doctor,
    evaluate,
    export,
    generate,
    import_model,
    launch,
    plan,
    plot,
    prepare_corpus,
    preprocess_data,
    report,
)

# Before the imports that say it: the output is for the results.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
warnings.filterwarnings("ignore", module=r"megatron\.core")

SUBCOMMANDS = (
    launch,
    doctor,
    plan,
    preprocess_data,
    prepare_corpus,
    plot,
    report,
    evaluate,
    generate,
    export,
    import_model,
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; `run` in the result is the chosen subcommand's function."""
    parser = argparse.ArgumentParser(prog="megatron-acco", description="Tools around a training run.")
    subparsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    for module in SUBCOMMANDS:
        module.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Exit code 2 and one line on stderr for what the user can put right."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"megatron-acco: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
