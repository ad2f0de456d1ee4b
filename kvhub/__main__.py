"""`python -m kvhub`, and `torchrun -m kvhub` for a calibration on several devices."""

from kvhub.cli import main

if __name__ == "__main__":
    main()
