"""Make `python -m qattn_hf` run `qattn`, for when the command is not on the PATH."""

from qattn_hf.cli import main

if __name__ == "__main__":
    main()
