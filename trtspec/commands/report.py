"""Compare runs of `trtspec eval`: a table in the terminal, and one HTML file that needs no network.

With --diagnose: why a run is as fast as it is and why its acceptance is what it is, causes named from the data, the
most important first. Some causes show only beside another run: give an unquantized one, or one at temperature 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trtspec.commands import Context, Outcome
from trtspec.files import setup_error, write_atomic

HELP = "compare runs: a terminal table, and a one-file HTML report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folders that `trtspec eval` wrote; of a sweep or a comparison, the folder around its runs",
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the report here; default: report.html in the last RUN",
    )
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write the requests of all runs here: .csv or .parquet"
    )
    parser.add_argument(
        "--diagnose", action="store_true", help="name the causes of low speed and low acceptance"
    )


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.evaluate.diagnose import diagnose
    from trtspec.evaluate.export import write_table
    from trtspec.evaluate.record import RunRecord
    from trtspec.evaluate.report import render_diagnosis, render_html, render_terminal, run_labels
    from trtspec.evaluate.report.verdict import verdicts_of

    records = [RunRecord.read(path) for given in arguments.runs for path in _runs_in(given)]
    last = arguments.runs[-1]
    html = written = arguments.html or (last if last.is_dir() else last.parent) / "report.html"
    try:
        write_atomic(html, render_html(records))
        if arguments.table:
            written = arguments.table
            write_table(records, written)
    except OSError as error:
        raise setup_error(error, written.parent) or error from error
    result = {
        "html": str(html),
        "runs": [{"name": r.name, **r.summary()} for r in records],
        "verdicts": [verdict.as_json() for verdict in verdicts_of(records)],
    }
    text = render_terminal(records)
    if arguments.diagnose:
        found = diagnose(records)
        result["diagnosis"] = [one.as_json() for one in found]
        text += f"\n\n{render_diagnosis(found, run_labels(records))}\n"
    if arguments.table:
        result["table"] = str(arguments.table)
        text += f"\n{arguments.table}: written"
    return Outcome(result, f"{text}\n{html}: written")


def _runs_in(given: Path) -> list[Path]:
    """A run itself, or the runs in the folder around them."""
    from trtspec.evaluate.record import RUN_FILE

    inside = [] if (given / RUN_FILE).is_file() else sorted(given.glob(f"*/{RUN_FILE}"))
    return [path.parent for path in inside] or [given]
