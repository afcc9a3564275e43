"""The command `densefeed` as `python -m densefeed`, for torchrun."""

from densefeed.system.commands import main

if __name__ == "__main__":
    main()
