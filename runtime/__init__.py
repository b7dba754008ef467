"""The engine: everything but the command line."""


def specdec_version() -> str | None:
    """Version of specdec; None where it was not installed, but runs from its directory."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("specdec-cli")
    except PackageNotFoundError:
        return None
