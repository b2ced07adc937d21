"""`python -m quire` is the `quire` command."""

from quire.app.cli import main

if __name__ == "__main__":
    main()
