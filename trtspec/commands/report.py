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
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders that `trtspec eval` wrote")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the report here; default: report.html in the last RUN",
    )
    parser.add_argument(
        "--diagnose", action="store_true", help="name the causes of low speed and low acceptance"
    )


def run(arguments: argparse.Namespace, _context: Context) -> Outcome:
    from trtspec.evaluate.diagnose import diagnose
    from trtspec.evaluate.record import RunRecord
    from trtspec.evaluate.report import distinct_labels, render_diagnosis, render_html, render_terminal

    records = [RunRecord.read(path) for path in arguments.runs]
    last = arguments.runs[-1]
    html = arguments.html or (last if last.is_dir() else last.parent) / "report.html"
    try:
        write_atomic(html, render_html(records))
    except OSError as error:
        raise setup_error(error, html.parent) or error from error
    result = {"html": str(html), "runs": [{"name": r.name, **r.summary()} for r in records]}
    text = render_terminal(records)
    if arguments.diagnose:
        found = diagnose(records)
        result["diagnosis"] = [one.as_json() for one in found]
        text += f"\n\n{render_diagnosis(found, distinct_labels(records))}\n"
    return Outcome(result, f"{text}\n{html}: written")
