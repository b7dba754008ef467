"""The engine: everything but the command line."""


def specdec_version() -> str | None:
    """Version of specdec; None if it is not installed but run from its directory."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("specdec-cli")
    except PackageNotFoundError:
        return None
