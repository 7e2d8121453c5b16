"""``python -m sdbench``."""

from sdbench.cli import main

if __name__ == "__main__":
    main()
