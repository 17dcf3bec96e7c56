"""`python -m services.worker.engine.native`: compile the kernels now, so that the first start need not."""

import sys

from services.worker.engine.native import build


def main() -> int:
    try:
        library = build.ensure()
    except build.KernelsUnavailable as error:
        sys.stderr.write(f"no native kernels, torch will be used and is slower: {error}\n")
        return 0
    sys.stdout.write(f"{library}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
