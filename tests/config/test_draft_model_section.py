"""The options of a draft model: what they take, and what their defaults mean."""

from __future__ import annotations

import pytest

from trtspec.config import dump_config, load_config
from trtspec.errors import ConfigError

CONFIG = """
name: pair
target: {{model: org/big}}
speculation: {{method: draft_model, draft: {{model: org/small, quantization: fp8}}{options}}}
"""


def test_defaults_sample_the_draft_as_the_request_is_sampled(write):
    speculation = load_config(write(CONFIG.format(options=""))).speculation
    assert speculation.draft_temperature is None
    assert (speculation.min_token_probability, speculation.draft_length) == (0.1, "auto")
    assert (speculation.draft.model, speculation.draft.quantization) == ("org/small", "fp8")


def test_options_survive_the_resolved_file(write):
    config = load_config(write(CONFIG.format(options=", draft_temperature: 0, min_token_probability: 0.4")))
    assert config.speculation.draft_temperature == 0
    assert load_config(write(dump_config(config))) == config


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (", draft_temperature: -1", "draft_temperature"),
        (", draft_temperature: cold", "draft_temperature"),
        (", min_token_probability: 1.5", "min_token_probability"),
        (", temperature: 1", "draft_temperature"),
    ],
)
def test_wrong_options_are_refused_where_they_stand(write, options: str, word: str):
    with pytest.raises(ConfigError, match=word) as caught:
        load_config(write(CONFIG.format(options=options)))
    assert caught.value.problems[0].where.split(":")[-2] == "4"
