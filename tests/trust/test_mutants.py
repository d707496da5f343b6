"""The text that each planted defect replaces is in the sources, so a change of the product cannot silently disable a
defect.
"""

from __future__ import annotations

import pytest

from tests.trust.mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_edits_of_a_mutant_fit_the_sources(mutant: Mutant) -> None:
    missing = [edit.old for edit in mutant.edits if edit.old not in (ROOT / edit.path).read_text()]
    assert not missing, f"the sources of {mutant.name!r} have changed"
