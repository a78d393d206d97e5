"""Train a diffusion transformer: torchtitan_dit/commands/train.py."""

from torchtitan_dit.cli import run_command

if __name__ == "__main__":
    run_command("train")
