"""`python -m specdec_cli`."""

from specdec_cli.start import main

if __name__ == "__main__":
    main()
