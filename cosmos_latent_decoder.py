"""Decode latents: torchtitan_dit/commands/cosmos_latent_decoder.py."""

from torchtitan_dit.cli import run_command

if __name__ == "__main__":
    run_command("cosmos_latent_decoder")
