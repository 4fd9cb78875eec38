"""`python -m genset.dynamo.frontend`: as `python -m genset.frontend`."""

from genset.frontend import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
