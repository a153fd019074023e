"""`python -m lockstep`: the command line, if the script `lockstep` is not on the path."""

from lockstep.cli import main

if __name__ == "__main__":
    main()
