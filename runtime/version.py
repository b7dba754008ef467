"""Version of specdec."""

from importlib.metadata import PackageNotFoundError, version


def specdec_version() -> str | None:
    """None where specdec was not installed, but runs from its directory."""
    try:
        return version("specdec-cli")
    except PackageNotFoundError:
        return None
