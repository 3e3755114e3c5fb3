"""``python -m snapkv_app``."""

import sys

try:
    from snapkv_app.cli import main
except KeyboardInterrupt:  # in the first moment, before the command line watches for it
    sys.stderr.write("snapkv: interrupted\n")
    sys.exit(130)

main()
