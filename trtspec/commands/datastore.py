"""Make the datastore that method rest drafts from: a corpus of text as a target's token ids, with a suffix array.

Everything that is UTF-8 text below CORPUS goes in, one document a file. The same corpus and model give the same bytes.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from trtspec.commands import Context, Outcome

HELP = "make a datastore of text or code for method rest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "corpus", help="a text file, a folder, or stdlib: the standard library of the running Python"
    )
    parser.add_argument(
        "--model", required=True, help="the target, whose tokenizer is used: folder, hub id or package:NAME"
    )
    parser.add_argument("--revision", help="commit of a hub model")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the datastore file")


def run(arguments: argparse.Namespace, context: Context) -> Outcome:
    from trtspec.checkpoints.sources import resolve_model
    from trtspec.drafters.datastore import open_tokenizer
    from trtspec.drafters.datastore_build import build_datastore, corpus_files
    from trtspec.store import default_root

    files = corpus_files(arguments.corpus)
    model = resolve_model(
        arguments.model,
        revision=arguments.revision,
        cache=default_root(),
        base=Path.cwd(),
        emit=context.emit,
    )
    report = build_datastore(files, open_tokenizer(model.path), arguments.out, context.emit)
    size = f"{report.tokens:,} tokens of {report.documents:,} documents, {report.bytes / 1e6:,.1f} MB"
    return Outcome(
        {**asdict(report), "file": str(report.file)},
        f"{report.file} written: {size}\nnext: speculation: {{method: rest, datastore: {report.file}}}",
    )
