"""`python -m genset.dynamo.common.backend.sample_main`: as `python -m genset.sample_main`."""

from genset.sample_main import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
