"""What `snapkv serve` makes of its options; no vLLM is needed here."""

import pytest

from snapkv.cli.app import run
from snapkv_vllm import server
from snapkv_vllm.documents.sharing import Sharing


@pytest.fixture
def settings_of(monkeypatch):
    """The settings that a server would have been started with."""

    def started(*options):
        found = []
        with monkeypatch.context() as patch:
            patch.setattr(server, "serve", lambda model, settings, *_, **__: found.append(settings))
            assert run(["serve", "demo", *options]) == 0
        return found[0]

    return started


@pytest.mark.parametrize(
    ("options", "sharing"),
    [
        ([], None),
        (["--share"], Sharing()),
        (["--share", "--share-bytes", "2GiB"], Sharing(most_bytes=2**31)),
        (["--share", "--share-bytes", "80MB"], Sharing(most_bytes=80_000_000)),
        (["--share", "--share-across-keys"], Sharing(across_keys=True)),
    ],
    ids=str,
)
def test_sharing_is_what_the_options_say(settings_of, options, sharing):
    assert settings_of(*options).sharing == sharing


def test_the_folder_of_documents_is_made_and_named_in_full(settings_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert settings_of("--share", "--share-folder", "a/b").sharing == Sharing(
        folder=str(tmp_path / "a" / "b")
    )
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--share-bytes", "2GiB"], "share-bytes: expected it with --share"),
        (["--share-folder", "here"], "share-folder: expected it with --share"),
        (["--share", "--share-folder", "/dev/null/x"], "share_folder: expected a folder"),
        (["--share-across-keys"], "share-across-keys: expected it with --share"),
        (["--share", "--share-bytes", "2"], "share_bytes: expected bytes with a unit"),
        (["--share", "--share-bytes", "0GiB"], "share_bytes: expected at least 1"),
        (["--share", "--cap", "2048"], "cap: expected none where documents are shared"),
        (
            ["--share", "--decode-budget", "2048"],
            "decode_budget: expected none where documents are shared",
        ),
    ],
    ids=str,
)
def test_what_sharing_cannot_be_together_with_is_refused_by_name(capsys, options, words):
    assert run(["serve", "demo", *options]) == 2
    assert words in capsys.readouterr().err
