"""Start and watch Triton on a packaged repository, and talk to it."""
