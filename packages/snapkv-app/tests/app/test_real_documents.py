"""Files of seventeen kinds that other people's programs have made are read."""

import pytest

from tests.app import real_documents


@pytest.mark.network
def test_every_real_document_is_read_with_its_words(tmp_path):
    absent, kinds = [], set()
    for package, path, words, text, _, _ in real_documents.readings(tmp_path):
        kinds.add(path.suffix)
        if words not in text:
            absent.append((package, path.name, words))
    assert absent == []
    assert len(kinds) == 17
