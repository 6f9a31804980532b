"""`python -m planish` is the `planish` command."""

from planish.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
