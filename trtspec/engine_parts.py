"""What a target's engine folder holds besides: drafts with engines of their own, a datastore."""

from __future__ import annotations

from pathlib import Path

from trtspec.files import files_below, link_or_copy
from trtspec.stage import Job
from trtspec.stage_requests import mark

DATASTORE = "datastore"  # the stage that makes one


def place_parts(job: Job, engine: Path, draft_stage: str) -> None:
    """Put what earlier stages made into the folder `engine`, which is then complete wherever it goes.

    draft_stage: name of the stage that made a draft's engine, of several drafts without their number.
    """
    from trtspec.drafters.datastore import FILE
    from trtspec.drafters.draft_model import draft_folder

    for number in (None, *range(len(job.models) - 1)):
        if draft := job.artifacts.get(f"{draft_stage}{mark(number)}"):
            folder = engine / draft_folder(number)
            folder.mkdir()
            for file in files_below(draft.path):
                link_or_copy(file, folder / file.relative_to(draft.path))
    if datastore := job.artifacts.get(DATASTORE):
        link_or_copy(datastore.path / FILE, engine / FILE)
