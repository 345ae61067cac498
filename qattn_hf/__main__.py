"""`python -m qattn_hf` is `qattn`, where the command is not on the PATH."""

from qattn_hf.cli import main

if __name__ == "__main__":
    main()
