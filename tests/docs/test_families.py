"""docs/models.md names the families that the code admits and the tests compare."""

from __future__ import annotations

import re
from pathlib import Path

from orchmllm.models.families import FAMILIES, TEXT_MODELS
from tests.lib import encoder_models, processors

DOC = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_table_of_families_is_that_of_the_code_and_the_tests():
    table = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|$", DOC.read_text(encoding="utf-8"), re.M))
    assert tuple(sorted(table)) == FAMILIES
    assert set(table.values()) <= set(TEXT_MODELS)
    assert set(FAMILIES) <= encoder_models.FAMILIES.keys() & processors.FAMILIES.keys()
    for name, text in table.items():
        config = encoder_models.FAMILIES[name].build().config
        assert config.get_text_config(decoder=True).model_type == text
