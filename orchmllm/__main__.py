"""`python -m orchmllm COMMAND ...`."""

from orchmllm.cli import main

if __name__ == "__main__":
    main()
