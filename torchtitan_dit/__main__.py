"""`python -m torchtitan_dit NAME ...` is `torchtitan-dit NAME ...`; torchrun starts it with -m."""

from torchtitan_dit.cli import main

if __name__ == "__main__":
    main()
