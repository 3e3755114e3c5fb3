"""The laboratory's commands run as those of the library do."""

from tests.cli.conftest import demo_only, document, here, snapkv, tiny, tiny_only  # noqa: F401 # fixtures
