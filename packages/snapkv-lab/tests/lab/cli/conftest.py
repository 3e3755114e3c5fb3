"""The laboratory's commands are run with the fixtures of the application's commands."""

from tests.cli.conftest import demo_only, document, here, snapkv, tiny, tiny_only  # noqa: F401 # fixtures
