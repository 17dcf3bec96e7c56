"""`python -m services.worker.engine.native`: compile our libraries now, so that the first start need not."""

import sys

from services.worker.engine.native import build


def main() -> int:
    for library, instead in (
        (build.KERNELS, "torch will be used and is slower"),
        (build.COLLECTIVE, "ranks of a group will talk through torch.distributed, which is slower"),
    ):
        try:
            sys.stdout.write(f"{build.ensure(library)}\n")
        except build.KernelsUnavailable as error:
            sys.stderr.write(f"no native {library.name}, {instead}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
