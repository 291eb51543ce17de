"""`python -m qurve`."""

from qurve.cli import main

if __name__ == "__main__":
    main()
