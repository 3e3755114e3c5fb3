"""Run an experiment, which writes its rows and its page to `docs/results`.

python -m snapkv_lab.experiments            list the experiments

python -m snapkv_lab.experiments NAME ...   run one; add `--help` for its options
"""

import sys

from snapkv.errors import wrong
from snapkv.validation import nearest
from snapkv_lab.experiments.experiment import load_experiments


def main() -> None:
    """Run the experiment that the command line names, or list all experiments.

    Raises:
        SystemExit: there is no such experiment, or an option is wrong.
    """
    experiments, name = load_experiments(), sys.argv[1] if len(sys.argv) > 1 else ""
    if name in experiments:
        experiments[name].main(sys.argv[2:])
    elif name in ("", "--list", "--help", "-h"):
        for each in experiments.values():
            print(f"{each.name:<24}{each.title}")
    else:
        problem = f"expected one of {', '.join(experiments)}, but got {name!r}"
        sys.exit(
            str(wrong("experiments", problem, nearest(name, experiments, "Use one of these names")))
        )


if __name__ == "__main__":
    main()
