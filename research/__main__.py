"""python -m research NAME ...: run a study, from the checkout; python -m research --help lists them."""

from torchtitan.processes.launch import bound_openmp_spin
from torchtitan.processes.parent_death import end_with_launcher

if __name__ == "__main__":
    end_with_launcher()  # before the seconds that importing torch takes
    bound_openmp_spin()
    from research.command_line import run

    run()
